"""Fixtures that the peer tests share with the gateway tests."""

from tests.gateway.conftest import scripted

__all__ = ["scripted"]
