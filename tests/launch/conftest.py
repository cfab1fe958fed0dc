"""Fixtures of the launcher's tests: those of the gateway's that they share."""

from tests.gateway.conftest import own_redis, redis_server, shared_redis

__all__ = ["own_redis", "redis_server", "shared_redis"]
