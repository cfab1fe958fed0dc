"""The decisions of the gateway and of its workers, as functions of their arguments.

These modules use no clock, randomness, I/O or device. Third-party policies implement the protocols
in `protocols`, and `testing` checks policies.
"""
