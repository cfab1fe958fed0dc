"""Fixtures of the gateway's tests that the peers' tests share."""

from tests.gateway.conftest import scripted

__all__ = ["scripted"]
