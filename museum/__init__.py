"""Seeded defects: real bugs put back into the portable engine, to show that the suite finds them."""

from museum.bug import BUGS, Bug, Patch, bug, find, seeded

__all__ = ["BUGS", "Bug", "Patch", "bug", "find", "seeded"]
