"""Requests that an upstream runs: the choice of the upstream, retries, and its response."""
