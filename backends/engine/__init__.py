"""The in-process worker: the only place with torch and triton."""
