"""Fixtures that the peer tests share with the gateway tests."""

from tests.gateway.conftest import _always_pulls, _quick_starts, scripted

__all__ = ["_always_pulls", "_quick_starts", "scripted"]
