"""Proofs that both ends of a connection know the cluster's secret, without sending it.

    gateway:  Authorization: Draftgate-Peer TIME:NONCE:MAC
                  MAC = HMAC-SHA256(secret, "gateway" | PATH | TIME | NONCE)
    peer:     in its first message, HMAC-SHA256(secret, "peer" | NONCE)

A bearer token would expose the secret to a server that impersonates a peer. A proof is valid once,
for a minute, at one path. A gateway sends no prompt before the peer has proved itself. The proofs
do not encrypt messages, so use TLS against eavesdroppers.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
from typing import Final, NamedTuple

WINDOW_S: Final = 60.0
"""Maximum difference between the clocks of two nodes, in seconds."""

LEAST_SECRET_CHARS: Final = 16
"""Minimum length of a secret. An attacker could guess a shorter secret offline from a recorded
proof."""

_SCHEME: Final = "Draftgate-Peer"
_PROOF: Final = re.compile(_SCHEME + r" ([0-9]{1,12}):([0-9a-f]{32}):([0-9a-f]{64})")


class Proof(NamedTuple):
    """A gateway's proof.

    Attributes:
        header: value of `Authorization`.
        answer: answer of a peer that knows the secret.
    """

    header: str
    answer: str


class SharedSecret:
    """The secret of a cluster. Times are Unix times in seconds."""

    def __init__(self, secret: str) -> None:
        """Check the length of the secret.

        Raises:
            ValueError: the secret is too short.
        """
        if len(secret) < LEAST_SECRET_CHARS:
            raise ValueError(f"the secret has fewer than {LEAST_SECRET_CHARS} characters")
        self._key = secret.encode("utf-8", "surrogateescape")

    def proof(self, path: str, now_s: float) -> Proof:
        """Return a new proof for a connection to a path."""
        nonce, time = secrets.token_hex(16), str(int(now_s))
        mac = self._mac("gateway", path, time, nonce)
        return Proof(f"{_SCHEME} {time}:{nonce}:{mac}", self._answer(nonce))

    def check(self, header: str, path: str, now_s: float) -> tuple[str, str] | None:
        """Return the nonce of a valid, recent proof and the answer to it, or None."""
        match = _PROOF.fullmatch(header)
        if match is None:
            return None
        time, nonce, mac = match.groups()
        right = hmac.compare_digest(mac, self._mac("gateway", path, time, nonce))
        if not right or abs(now_s - int(time)) > WINDOW_S:
            return None
        return nonce, self._answer(nonce)

    def derive(self, purpose: str) -> bytes:
        """Return a key for another purpose, which reveals nothing about the secret."""
        return hmac.new(self._key, purpose.encode(), hashlib.sha256).digest()

    def _answer(self, nonce: str) -> str:
        return self._mac("peer", nonce)

    def _mac(self, *parts: str) -> str:
        return hmac.new(self._key, "|".join(parts).encode(), hashlib.sha256).hexdigest()


class ProofChecker:
    """Accepts each proof once. Nonces are kept until their proofs have expired."""

    def __init__(self, secret: SharedSecret) -> None:
        self._secret = secret
        self._expiry_by_nonce: dict[str, float] = {}  # nonce -> expiry

    def answer(self, header: str, path: str, now_s: float) -> str | None:
        """Return the answer to a valid, recent and unused proof, or None."""
        for nonce in [nonce for nonce, until_s in self._expiry_by_nonce.items() if until_s < now_s]:
            del self._expiry_by_nonce[nonce]
        found = self._secret.check(header, path, now_s)
        if found is None or found[0] in self._expiry_by_nonce:
            return None
        nonce, answer = found
        self._expiry_by_nonce[nonce] = now_s + 2 * WINDOW_S  # the other clock may be ahead
        return answer


def is_answer(proof: Proof | None, answer: str) -> bool:
    """Return whether a peer has proved itself, which is always true without a secret."""
    # A header may contain any bytes, and `compare_digest` takes no text beyond ASCII.
    given = answer.encode("utf-8", "surrogateescape")
    return proof is None or hmac.compare_digest(proof.answer.encode(), given)


def secret_of(variable: str | None) -> SharedSecret | None:
    """Return the secret in an environment variable, or None if `variable` is None.

    Raises:
        ValueError: the variable is not set, or the secret is too short.
    """
    if variable is None:
        return None
    secret = os.environ.get(variable, "").strip()
    if not secret:
        raise ValueError(f"--peer-secret-env: the variable {variable} is not set")
    try:
        return SharedSecret(secret)
    except ValueError as error:
        raise ValueError(f"--peer-secret-env: {variable}: {error}") from None
