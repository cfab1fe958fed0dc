"""Decisions: values in, values out. No clock, randomness, I/O or device.

Third-party policies implement `protocols`, and `testing` checks them.
"""
