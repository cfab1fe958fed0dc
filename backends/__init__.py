"""Backends, which run requests. `core` plans steps, and the other packages execute them."""
