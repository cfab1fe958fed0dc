"""Fixtures of the launcher's tests, shared with the gateway tests."""

from tests.gateway.conftest import own_redis, redis_server, shared_redis

__all__ = ["own_redis", "redis_server", "shared_redis"]
