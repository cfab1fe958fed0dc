"""Fixtures of the benchmarks' tests: the Redis server of the gateway's tests."""

from tests.gateway.conftest import redis_server, shared_redis

__all__ = ["redis_server", "shared_redis"]
