"""Shared parts of the benchmarks: arguments, provenance, processes, servers, prompts."""
