"""Fixtures that the cluster tests share with the gateway tests."""

from tests.gateway.conftest import own_redis, scripted

__all__ = ["own_redis", "scripted"]
