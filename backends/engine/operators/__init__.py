"""Operators between the matrix products of a decoder, one module per implementation.

`reference` is torch and defines the arithmetic; `native` is C for CPUs, compiled at the first
start; `triton` is for GPUs. Tests compare the others with `reference`.
"""
