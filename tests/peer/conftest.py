"""Fixtures that the peer tests share with the gateway tests."""

from tests.gateway.conftest import _always_pulls, scripted

__all__ = ["_always_pulls", "scripted"]
