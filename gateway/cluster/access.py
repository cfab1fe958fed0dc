"""Access control for nodes that use this node's workers.

Nodes must know the secret of the cluster. Only processes on this machine have access without a
secret, and only if clients need no API key. Requests with an `Origin` are rejected, because any web
page can make a browser connect to this machine.
"""

from __future__ import annotations

import asyncio
import ipaddress
import os
import secrets
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from typing import Final

from yarl import URL

from draftgate.backends.peer.backend import PeerBackend
from draftgate.backends.peer.proof import ProofChecker, SharedSecret, secret_of
from draftgate.backends.peer.tokenizer import Tokenizers
from draftgate.gateway.cluster.members import Reach
from draftgate.gateway.config import ServeConfig
from draftgate.gateway.process import SECRET_ENV
from draftgate.gateway.state.local.store import SCHEME
from draftgate.gateway.state.redis.url import read_redis_url
from draftgate.gateway.state.values import WorkerReport

NO_PROOF: Final = ""
"""The response to a peer that needs no proof."""


class PeerAccess:
    """An authenticator of peers.

    Attributes:
        secret: the secret of the cluster, or None without one.
    """

    def __init__(self, secret: SharedSecret | None, now_s: Callable[[], float] = time.time) -> None:
        """Require proofs of a secret.

        Args:
            secret: the secret, or None to require no proofs.
            now_s: the clock, in Unix time.
        """
        self.secret = secret
        self._proofs = None if secret is None else ProofChecker(secret)
        self._now_s = now_s

    def admit(self, path: str, headers: Mapping[str, str]) -> str | None:
        """Return the response to a request's proof, or None to reject the request.

        A proof is valid only once.
        """
        if "Origin" in headers:
            return None
        if self._proofs is None:
            return NO_PROOF
        return self._proofs.answer(headers.get("Authorization", ""), path, self._now_s())


def peer_access(config: ServeConfig, *, keys: bool) -> PeerAccess | None:
    """Return the access control for peers, or None if no other node may use the workers.

    Args:
        keys: whether clients need an API key.

    Raises:
        ValueError: the variable with the secret is not set, or the secret is too short.
    """
    secret = secret_of(config.peer_secret_env)
    if secret is None and (keys or not is_loopback(config.host)):
        return None
    return PeerAccess(secret)


def is_loopback(host: str) -> bool:
    """Return whether only this machine can connect to a listen address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


# --- The address at which other nodes reach this node ---------------------------------------------


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


def reach_of(config: ServeConfig) -> Reach | None:
    """Return the function that reaches other nodes' workers, or None if they are not used.

    Raises:
        ValueError: the peer secret is missing.
    """
    if config.join is None or config.only_forwards:
        return None
    secret, tokenizers = secret_of(config.peer_secret_env), Tokenizers()

    def reach(report: WorkerReport) -> PeerBackend:
        return PeerBackend(report.address, secret, report.epoch, tokenizers=tokenizers)

    return reach


def session_secret(config: ServeConfig) -> bytes:
    """Return the key of sessions: of the pool, of the processes of this node, or of this process.

    Raises:
        ValueError: the peer secret is missing.
    """
    name = config.peer_secret_env or (SECRET_ENV if SECRET_ENV in os.environ else None)
    shared = secret_of(name)
    return secrets.token_bytes(32) if shared is None else shared.derive("sessions")
