"""Routing policies, which choose the worker of a request."""
