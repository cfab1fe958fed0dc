"""Any server that speaks OpenAI's API, as an upstream: vLLM, SGLang, llama.cpp, Draftgate, ..."""
