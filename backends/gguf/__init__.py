"""GGUF files, the format of llama.cpp, as checkpoints in Hugging Face layout."""
