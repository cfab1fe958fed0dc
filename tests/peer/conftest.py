"""Fixtures of the peers' tests: those of the gateway's that they share."""

from tests.gateway.conftest import scripted

__all__ = ["scripted"]
