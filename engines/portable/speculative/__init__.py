"""Workers, their metadata and drafters, and what they share."""
