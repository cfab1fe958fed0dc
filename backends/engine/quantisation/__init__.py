"""Quantised weights: the formats of checkpoints, their tensors, and products with them."""
