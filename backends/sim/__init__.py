"""The simulator: the production scheduler on a model of a device. Never imports torch."""
