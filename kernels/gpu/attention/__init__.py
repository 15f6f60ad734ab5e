"""Attention over committed rows and those of a pass, and their cache."""
