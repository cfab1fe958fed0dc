"""Encoders of the BERT type, which embed a whole text in one step and have no KV cache."""
