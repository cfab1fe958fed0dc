"""Benchmarks of the gateway for slow clients, overload, tracing and the state store."""
