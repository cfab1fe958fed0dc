"""Triton kernels of the engine, each beside the torch function that defines it.

A module ``x_ref`` (and ``noise``) needs torch and numpy only, runs on any device and is what the
CPU engine uses; module ``x`` holds the Triton kernels and a wrapper of the same signature. Nothing
is imported here, so that the references can be used where Triton is not installed.
"""
