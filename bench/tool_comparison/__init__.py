"""Comparison of load generators with the known behaviour of a mock server."""
