"""Campaigns: search, execution, persistence, reports and the command line."""
