"""Where other nodes reach this one."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from contextlib import closing
from typing import Final

from yarl import URL

from draftgate.gateway.cluster.access import is_loopback
from draftgate.gateway.config import ServeConfig
from draftgate.gateway.state.redis.url import read_redis_url

_WILDCARDS: Final = {"0.0.0.0": socket.AF_INET, "::": socket.AF_INET6}  # noqa: S104 - no bind


async def advertised_url(config: ServeConfig, port: int) -> str:
    """Return the address that a node which joins a pool tells the others.

    What it was told to, else where it listens; if that is everywhere, the address from which it
    reaches the state store.

    Args:
        port: where it listens.

    Raises:
        ValueError: it cannot tell; the message says what to do.
    """
    if config.advertise is not None:
        return config.advertise.rstrip("/")
    host = config.host
    if host in _WILDCARDS:
        hosts = read_redis_url(config.join).hosts if config.join else ()
        host = await asyncio.to_thread(_outward, _WILDCARDS[host], hosts)
    return str(URL.build(scheme="http", host=host, port=port))


def is_local(url: str, join: str) -> bool:
    """Return whether an address is of this machine alone, though the state store is elsewhere."""
    hosts = [host for host, _ in read_redis_url(join).hosts]
    return is_loopback(URL(url).host or "") and not all(map(is_loopback, hosts))


def _outward(family: socket.AddressFamily, hosts: Sequence[tuple[str, int]]) -> str:
    """Return the address of this machine from which others are reached, the first that answers.

    A UDP socket that is connected has one, and nothing is sent.
    """
    for host, port in (*hosts, (socket.gethostname(), 9)):
        with closing(socket.socket(family, socket.SOCK_DGRAM)) as probe:
            try:
                probe.connect((host, port))
            except OSError:  # no such name now, or none of this family
                continue
            return str(probe.getsockname()[0])
    raise ValueError("where other nodes reach this one is not known: say it with --advertise URL")
