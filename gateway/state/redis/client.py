"""Connections to Redis, by address."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Final

from redis import exceptions
from redis.asyncio import Redis
from redis.asyncio.cluster import ClusterNode, RedisCluster
from redis.asyncio.connection import SSLConnection, parse_url
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel
from redis.backoff import NoBackoff

from draftgate.gateway.state.redis.url import RedisUrl, Topology, read_redis_url

CONNECT_S: Final = 1.0
"""For a connection, with TLS and names to be looked up. Nobody waits for it: calls have a deadline
of their own (`gateway.state.calls`)."""

ANSWER_S: Final = 1.0
"""An answer that takes longer does not come: the connection is given up. So no more calls linger
with a server that is stuck than come within a second."""

RETRIES: Final = 1
"""At once, on a new connection: the old one may be of a server that was restarted since. All
scripts may be run twice."""

BROKEN: Final = (exceptions.ConnectionError, exceptions.TimeoutError, RuntimeError)
"""What a connection that broke may raise: uvloop's transports raise RuntimeError where they are
written to after a reset."""


@dataclass(frozen=True, slots=True)
class Connected:
    """A client, and what there is to close, in this order."""

    client: Redis | RedisCluster
    closing: tuple[Callable[[], Awaitable[None]], ...]


def open_client(address: str) -> Connected:
    """Return a client for an address of `gateway.state.redis.url`; it connects when it is used.

    Raises:
        ValueError: it is none, or an option is not known.
    """
    url = read_redis_url(address)
    try:
        return _OPENERS[url.topology](url)
    except TypeError:  # which names the argument that an option became
        raise ValueError("the address of the state store has an unknown option") from None


def _options() -> dict[str, Any]:
    """What all connections have. The older protocol asks for no answers beside its own."""
    return {
        "decode_responses": True,
        "protocol": 2,
        "socket_connect_timeout": CONNECT_S,
        "socket_timeout": ANSWER_S,
        "retry": Retry(NoBackoff(), RETRIES, BROKEN),  # type: ignore[arg-type] # it takes any
    }


def _given(url: RedisUrl) -> dict[str, Any]:
    """What the address says of user, password, database, TLS and options."""
    given: dict[str, Any] = {**parse_url(url.plain)}
    if given.pop("connection_class", None) is SSLConnection:
        given["ssl"] = True
    del given["host"], given["port"]
    return given


def _single(url: RedisUrl) -> Connected:
    client = Redis.from_url(url.plain, **_options())
    _try_options(client)
    return Connected(client, (client.aclose,))


def _sentinel(url: RedisUrl) -> Connected:
    given = _given(url)
    own = {name: given.pop(f"sentinel_{name}", None) for name in ("username", "password")}
    tls = {name: value for name, value in given.items() if name.startswith("ssl")}
    asking = {**_options(), **tls, **own, "retry": Retry(NoBackoff(), 0)}
    sentinel = Sentinel(  # type: ignore[no-untyped-call]
        url.hosts, sentinel_kwargs=asking, **_options(), **given
    )
    client = sentinel.master_for(url.service)
    _try_options(client)
    return Connected(client, (client.aclose, *(one.aclose for one in sentinel.sentinels)))


def _try_options(client: Redis) -> None:
    """Make a connection as the pool will, without connecting, for the sake of a TypeError."""
    pool = client.connection_pool
    pool.connection_class(**pool.connection_kwargs)


def _cluster(url: RedisUrl) -> Connected:
    nodes = [ClusterNode(host, port) for host, port in url.hosts]
    client = RedisCluster(startup_nodes=nodes, **_options(), **_given(url))
    return Connected(client, (client.aclose,))


_OPENERS: Final[dict[Topology, Callable[[RedisUrl], Connected]]] = {
    Topology.SINGLE: _single,
    Topology.SENTINEL: _sentinel,
    Topology.CLUSTER: _cluster,
}
