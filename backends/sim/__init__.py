"""The simulator: the worker's own scheduler against a cost model. Never imports torch."""
