"""Backends run requests: `core` plans steps, and the packages beside it run them."""
