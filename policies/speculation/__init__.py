"""Whether and how far to speculate: for a request at the gateway, for each step in the worker."""
