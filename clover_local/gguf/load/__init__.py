"""Opens a GGUF file as a checkpoint."""
