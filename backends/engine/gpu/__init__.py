"""Execution on a GPU: one copy in, a captured forward pass, one copy out."""
