"""The endpoints, one module for each kind: what a path does."""
