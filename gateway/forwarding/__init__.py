"""The path of a request that goes on as it came, to an upstream, and of the answer it gives."""
