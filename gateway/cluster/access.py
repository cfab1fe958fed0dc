"""Which nodes may use this one's workers: those that know the cluster's secret.

Without a secret only this machine's own processes may, and only where clients need no key either.
A browser's may not: a page from anywhere can make it open connections to this machine.
"""

from __future__ import annotations

import ipaddress
import time
from collections.abc import Callable, Mapping
from typing import Final

from draftgate.backends.peer.proof import ProofChecker, SharedSecret, secret_of
from draftgate.gateway.config import ServeConfig

NO_PROOF: Final = ""
"""The answer to a peer of which no proof is asked."""


class PeerAccess:
    """Decides who is a peer."""

    def __init__(self, secret: SharedSecret | None, now_s: Callable[[], float] = time.time) -> None:
        """Ask for proofs of a secret; None asks for none."""
        self._proofs = None if secret is None else ProofChecker(secret)
        self._now_s = now_s

    def admit(self, path: str, headers: Mapping[str, str]) -> str | None:
        """Return the answer to a request's proof, which counts once; None for strangers."""
        if "Origin" in headers:
            return None
        if self._proofs is None:
            return NO_PROOF
        return self._proofs.answer(headers.get("Authorization", ""), path, self._now_s())


def peer_access(config: ServeConfig, *, keys: bool) -> PeerAccess | None:
    """Return who may use this node's workers; None if no other node may.

    Args:
        keys: whether clients need one.

    Raises:
        ValueError: the secret is named, but not set, or too short.
    """
    secret = secret_of(config.peer_secret_env)
    if secret is None and (keys or not is_loopback(config.host)):
        return None
    return PeerAccess(secret)


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches an address to listen on."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
