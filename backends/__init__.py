"""Backends run requests: `core` decides steps, the families beside it carry them out."""
