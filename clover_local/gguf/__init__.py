"""GGUF, the file format of llama.cpp: reading, writing, and the way between it and a checkpoint."""
