"""Checkpoints that other programs quantized, as the runtime's own packed weights, exactly."""
