"""Access control for nodes that use this node's workers.

Nodes must know the secret of the cluster. Only processes on this machine have access without a
secret, and only if clients need no API key. Requests with an `Origin` are rejected, because any web
page can make a browser connect to this machine.
"""

from __future__ import annotations

import ipaddress
import time
from collections.abc import Callable, Mapping
from typing import Final

from draftgate.backends.peer.proof import ProofChecker, SharedSecret, secret_of
from draftgate.gateway.config import ServeConfig

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
