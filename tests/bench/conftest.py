"""Fixtures of the benchmark tests, including the Redis server of the gateway tests."""

from tests.gateway.conftest import redis_server, shared_redis

__all__ = ["redis_server", "shared_redis"]
