"""Quantizing a checkpoint: layer by layer, within a memory limit, to be continued after a stop."""
