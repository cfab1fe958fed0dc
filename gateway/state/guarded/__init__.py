"""Wrappers of remote stores that always respond in time."""
