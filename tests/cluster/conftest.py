"""Fixtures of the cluster's tests, shared with the gateway's tests."""

from tests.gateway.conftest import own_redis, scripted

__all__ = ["own_redis", "scripted"]
