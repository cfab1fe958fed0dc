"""Triton kernels of the engine, each with a torch function that defines its result.

A module ``x_ref`` (and ``noise``) needs only torch and NumPy and runs on any device. Module ``x``
holds the Triton kernels and a wrapper with the same signature. This package imports neither, so the
references also work without Triton.
"""
