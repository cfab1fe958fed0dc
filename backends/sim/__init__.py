"""The simulator, which runs the production scheduler on a model of a device, without torch."""
