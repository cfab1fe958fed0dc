"""Addresses of Redis, for a single server, a service of Sentinels, or a Redis Cluster.

    redis://[[USER]:PASSWORD@]HOST[:6379][/DB]
    unix://[[USER]:PASSWORD@]/PATH[?db=DB]
    redis+sentinel://[[USER]:PASSWORD@]HOST[:26379][,HOST[:26379]...]/SERVICE[/DB]
    redis+cluster://[[USER]:PASSWORD@]HOST[:6379][,HOST[:6379]...]

The scheme `rediss` instead of `redis` enables TLS. Options of redis-py's connections follow `?`,
such as `ssl_ca_certs=FILE`. The options `sentinel_username` and `sentinel_password` are for
Sentinels with their own password.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final
from urllib.parse import SplitResult, unquote, urlsplit

from draftgate.addresses import mask_url


class Topology(StrEnum):
    """The arrangement of the servers of a store."""

    SINGLE = "single"
    SENTINEL = "sentinel"
    CLUSTER = "cluster"


_PORTS: Final = {Topology.SINGLE: 6379, Topology.SENTINEL: 26379, Topology.CLUSTER: 6379}

_EXPECTED: Final = (
    "expected the address of a Redis server, such as redis://127.0.0.1:6379, "
    "redis+sentinel://HOST:26379/SERVICE or redis+cluster://HOST:6379"
)


@dataclass(frozen=True, slots=True)
class RedisUrl:
    """A parsed address.

    Attributes:
        plain: URL in redis-py's form, with scheme, user, password, database and options. Its host
            is the first of `hosts`.
        hosts: hosts and ports of servers or Sentinels, empty for a Unix socket.
        service: the service name of the Sentinels, or an empty string.
    """

    topology: Topology
    plain: str
    hosts: tuple[tuple[str, int], ...] = ()
    service: str = ""


def read_redis_url(text: str) -> RedisUrl:
    """Parse an address.

    Raises:
        ValueError: the address is invalid. The message contains no password.
    """
    try:
        return _read(text)
    except ValueError:
        raise ValueError(_EXPECTED + _suggestion(text)) from None


def _suggestion(text: str) -> str:
    """Return a question with the probable address after a semicolon, or an empty string."""
    if "://" in text or not text:
        return ""
    try:
        _read(f"redis://{text}")
    except ValueError:
        return ""
    return f"; did you mean {mask_url(f'redis://{text}')}?"


def _read(text: str) -> RedisUrl:
    parts = urlsplit(text)
    scheme, plus, kind = parts.scheme.partition("+")
    topology = Topology(kind) if plus else Topology.SINGLE
    if scheme == "unix" and not plus and parts.path:
        return RedisUrl(topology, text)
    if scheme not in {"redis", "rediss"}:
        raise ValueError(scheme)
    user, at, listed = parts.netloc.rpartition("@")
    hosts = tuple(_host(one, _PORTS[topology]) for one in listed.split(","))
    path = parts.path.strip("/").split("/")
    service = unquote(path.pop(0)) if topology is Topology.SENTINEL else ""
    database = path[0] if path else ""
    _check(topology, hosts, service, database, deeper=len(path) > 1)
    name, port = hosts[0]
    netloc = f"{user}{at}{f'[{name}]' if ':' in name else name}:{port}"
    plain = SplitResult(scheme, netloc, database and f"/{database}", parts.query, "").geturl()
    return RedisUrl(topology, plain, hosts, service)


def _host(text: str, default_port: int) -> tuple[str, int]:
    parts = urlsplit(f"//{text}")
    if not parts.hostname or parts.port == 0:
        raise ValueError(text)
    return parts.hostname, parts.port or default_port


def _check(
    topology: Topology,
    hosts: tuple[tuple[str, int], ...],
    service: str,
    database: str,
    *,
    deeper: bool,
) -> None:
    several = len(hosts) > 1 and topology is Topology.SINGLE
    nameless = topology is Topology.SENTINEL and not service
    databases = topology is Topology.CLUSTER and database not in {"", "0"}
    if several or nameless or databases or deeper or not (database or "0").isdecimal():
        raise ValueError(database)
