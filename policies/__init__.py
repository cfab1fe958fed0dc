"""Decisions, without I/O: values in, values out.

No clock, no randomness, no device: time and random sources are arguments. This package also
holds the core value types (`policies.types`) which the backends and the gateway speak.
"""
