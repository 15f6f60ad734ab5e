"""Grouped products over the experts of a layer, whose records lie in slots."""
