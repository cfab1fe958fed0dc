"""Fixtures that the cluster tests share with the gateway tests."""

from tests.gateway.conftest import _quick_starts, own_redis, scripted

__all__ = ["_quick_starts", "own_redis", "scripted"]
