"""Connections to Redis, by address."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from redis import exceptions
from redis.asyncio import Redis
from redis.asyncio.cluster import ClusterNode, RedisCluster
from redis.asyncio.connection import SSLConnection, parse_url
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel
from redis.backoff import NoBackoff

from draftgate.gateway.state.redis.url import RedisUrl, Topology, read_redis_url

_CONNECT_S: Final = 1.0
"""Timeout of a connection, with TLS and name resolution.

No request waits for this timeout, because calls have their own deadline
(`gateway.state.guarded.calls`)."""

ANSWER_S: Final = 1.0
"""Timeout of a response, after which the connection is closed.

The timeout limits the calls that a hung server accumulates to the calls of one second."""

_RETRIES: Final = 1
"""Immediate retries on a new connection, because the server may have restarted.

Every script may run twice."""

BROKEN: Final = (exceptions.ConnectionError, exceptions.TimeoutError, RuntimeError)
"""Errors of a broken connection. uvloop's transports raise RuntimeError in a write after a
reset."""


Options: TypeAlias = dict[str, Any]
"""Arguments of a client for its connections."""


@dataclass(frozen=True, slots=True)
class Connected:
    """A client, and the functions that close it, in order."""

    client: Redis | RedisCluster
    closing: tuple[Callable[[], Awaitable[None]], ...]


def open_client(address: str, *, decode: bool = True) -> Connected:
    """Return a client for an address (`gateway.state.redis.url`), which connects on first use.

    Args:
        decode: whether texts in results are `str`. They are bytes otherwise.

    Raises:
        ValueError: the address is invalid, or an option is unknown.
    """
    url = read_redis_url(address)
    try:
        return _OPENERS[url.topology](url, {**_options(), "decode_responses": decode})
    except TypeError:  # redis-py raises TypeError for an unknown option
        raise ValueError("the address of the state store has an unknown option") from None


def _options() -> Options:
    """Return the options of all connections.

    The connections use RESP2, because it has no push messages.
    """
    return {
        "decode_responses": True,
        "protocol": 2,
        "socket_connect_timeout": _CONNECT_S,
        "socket_timeout": ANSWER_S,
        "retry": Retry(NoBackoff(), _RETRIES, BROKEN),  # type: ignore[arg-type] # every exception is accepted
    }


def _url_options(url: RedisUrl) -> Options:
    """Return user, password, database, TLS and options of the address."""
    given: Options = {**parse_url(url.plain)}
    if given.pop("connection_class", None) is SSLConnection:
        given["ssl"] = True
    del given["host"], given["port"]
    return given


def _single(url: RedisUrl, options: Options) -> Connected:
    client = Redis.from_url(url.plain, **options)
    _try_options(client)
    return Connected(client, (client.aclose,))


def _sentinel(url: RedisUrl, options: Options) -> Connected:
    given = _url_options(url)
    own = {name: given.pop(f"sentinel_{name}", None) for name in ("username", "password")}
    tls = {name: value for name, value in given.items() if name.startswith("ssl")}
    sentinel_options = {**_options(), **tls, **own, "retry": Retry(NoBackoff(), 0)}
    sentinel = Sentinel(  # type: ignore[no-untyped-call]
        url.hosts, sentinel_kwargs=sentinel_options, **options, **given
    )
    client = sentinel.master_for(url.service)
    _try_options(client)
    return Connected(client, (client.aclose, *(one.aclose for one in sentinel.sentinels)))


def _try_options(client: Redis) -> None:
    """Build a connection as the pool does, without connecting, to raise TypeError early."""
    pool = client.connection_pool
    pool.connection_class(**pool.connection_kwargs)


def _cluster(url: RedisUrl, options: Options) -> Connected:
    nodes = [ClusterNode(host, port) for host, port in url.hosts]
    client = RedisCluster(startup_nodes=nodes, **options, **_url_options(url))
    return Connected(client, (client.aclose,))


_OPENERS: Final[dict[Topology, Callable[[RedisUrl, Options], Connected]]] = {
    Topology.SINGLE: _single,
    Topology.SENTINEL: _sentinel,
    Topology.CLUSTER: _cluster,
}
