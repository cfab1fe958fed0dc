"""Operators between the matrix products of a decoder, one module per implementation.

`reference` uses torch and defines the arithmetic. `native` uses C on CPUs, compiled at the first
start. `triton` is for GPUs. Tests compare `native` and `triton` with `reference`.
"""
