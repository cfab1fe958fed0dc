"""Reads the weights of GGUF files."""
