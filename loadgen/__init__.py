"""Measures a server from outside: HTTP and the public schemas are all it knows."""
