"""What benchmarks share: arguments, provenance, processes, servers, prompts."""
