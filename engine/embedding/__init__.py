"""Models that return vectors or scores instead of text."""
