"""The address at which other nodes reach this node."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from contextlib import closing
from typing import Final

from yarl import URL

from draftgate.gateway.cluster.access import is_loopback
from draftgate.gateway.config import ServeConfig
from draftgate.gateway.state.local.store import SCHEME
from draftgate.gateway.state.redis.url import read_redis_url

_WILDCARDS: Final = {"0.0.0.0": socket.AF_INET, "::": socket.AF_INET6}  # noqa: S104 - no bind


async def advertised_url(config: ServeConfig, port: int) -> str:
    """Return the URL that a node of a pool advertises.

    The URL is `--advertise`, or the listen address of the node. A wildcard address is replaced by
    the local address of a connection to the state store.

    Args:
        port: the port on which the node listens.

    Raises:
        ValueError: the address cannot be determined. The message says what to do.
    """
    if config.advertise is not None:
        return config.advertise.rstrip("/")
    host = config.host
    if host in _WILDCARDS:
        hosts = read_redis_url(config.join).hosts if config.join else ()
        host = await asyncio.to_thread(_local_address, _WILDCARDS[host], hosts)
    return str(URL.build(scheme=config.scheme, host=host, port=port))


def is_local(url: str, join: str) -> bool:
    """Return whether a URL is a loopback address although the state store is on another host."""
    if join.startswith(SCHEME):
        return False  # only processes of this machine join such a store
    hosts = [host for host, _ in read_redis_url(join).hosts]
    return is_loopback(URL(url).host or "") and not all(map(is_loopback, hosts))


def _local_address(family: socket.AddressFamily, hosts: Sequence[tuple[str, int]]) -> str:
    """Return the local address of a connection to the first host that resolves.

    Connecting a UDP socket assigns a local address without sending anything.
    """
    for host, port in (*hosts, (socket.gethostname(), 9)):
        with closing(socket.socket(family, socket.SOCK_DGRAM)) as probe:
            try:
                probe.connect((host, port))
            except OSError:  # the name has no address in this family
                continue
            return str(probe.getsockname()[0])
    raise ValueError(
        "cannot determine the address at which other nodes reach this node: set --advertise URL"
    )
