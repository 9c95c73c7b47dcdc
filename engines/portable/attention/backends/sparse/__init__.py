"""Backends whose rows see a selection of their tokens."""
