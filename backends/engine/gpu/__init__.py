"""Execution on a GPU: a single copy in, a captured forward pass, a single copy out."""
