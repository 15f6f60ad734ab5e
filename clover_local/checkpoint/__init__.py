"""Files of a checkpoint: which tensors they hold, what becomes of each, reading, writing."""
