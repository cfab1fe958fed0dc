"""Benchmarks of the gateway: slow readers, overload, tracing and the state store."""
