"""The decoding and validation of requests, and their conversion to jobs."""
