"""Compressed attention: windows of plain tokens, and tokens that stand for several."""
