"""Upstreams with OpenAI's API, such as vLLM, SGLang, llama.cpp and Draftgate."""
