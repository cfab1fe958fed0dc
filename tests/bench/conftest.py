"""Fixtures of the benchmarks' tests: a Redis server, as the gateway's tests have it."""

from tests.gateway.conftest import redis_server, shared_redis

__all__ = ["redis_server", "shared_redis"]
