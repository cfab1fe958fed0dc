"""Benchmarks of the gateway: what readers, overload, tracing and the store cost."""
