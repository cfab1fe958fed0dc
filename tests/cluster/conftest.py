"""Fixtures of the cluster's tests: those of the gateway's that they share."""

from tests.gateway.conftest import own_redis, scripted

__all__ = ["own_redis", "scripted"]
