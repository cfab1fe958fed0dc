"""Shared arguments, provenance, processes, servers and prompts of the benchmarks."""
