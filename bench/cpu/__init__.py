"""Draftgate, vLLM and llama.cpp with the same model and the same requests."""
