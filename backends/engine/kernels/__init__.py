"""Triton kernels of the engine, each beside the torch function that defines it.

A module ``x_ref`` (and ``noise``) needs only torch and NumPy and runs on any device. Module ``x``
holds the Triton kernels and a wrapper with the same signature. This package imports neither, so the
references also work where Triton is not installed.
"""
