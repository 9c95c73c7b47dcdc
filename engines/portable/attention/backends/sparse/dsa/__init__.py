"""Attention to what an indexer selects."""
