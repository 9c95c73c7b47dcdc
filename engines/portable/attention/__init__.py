"""Attention metadata and attention of the portable engine, in the places that upstream has for them."""
