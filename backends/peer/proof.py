"""Proofs that both ends of a connection know the cluster's secret, which itself is never sent.

    gateway:  Authorization: Draftgate-Peer TIME:NONCE:MAC
                  MAC = HMAC-SHA256(secret, "gateway" | PATH | TIME | NONCE)
    peer:     in its welcome, HMAC-SHA256(secret, "peer" | NONCE)

A bearer token would be the secret itself, for whoever reads a connection, or answers in a peer's
place. A proof is good once, for a minute, at one path; and a gateway sends no prompt to a peer that
has not proved itself. Neither keeps anybody from reading along: that is TLS' business.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
from typing import Final, NamedTuple

WINDOW_S: Final = 60.0
"""Clocks of two nodes may differ by so much."""

LEAST_SECRET_CHARS: Final = 16
"""Shorter ones can be guessed: who has heard one proof can try secrets by the million."""

_SCHEME: Final = "Draftgate-Peer"
_PROOF: Final = re.compile(_SCHEME + r" ([0-9]{1,12}):([0-9a-f]{32}):([0-9a-f]{64})")


class Proof(NamedTuple):
    """A gateway's proof.

    Attributes:
        header: for `Authorization`.
        answer: what a peer that knows the secret answers.
    """

    header: str
    answer: str


class SharedSecret:
    """The secret of a cluster. Times are Unix times in seconds."""

    def __init__(self, secret: str) -> None:
        """Keep it.

        Raises:
            ValueError: it is too short.
        """
        if len(secret) < LEAST_SECRET_CHARS:
            raise ValueError(f"the secret has fewer than {LEAST_SECRET_CHARS} characters")
        self._key = secret.encode("utf-8", "surrogateescape")

    def proof(self, path: str, now_s: float) -> Proof:
        """Return a new proof for a connection at a path."""
        nonce, time = secrets.token_hex(16), str(int(now_s))
        mac = self._mac("gateway", path, time, nonce)
        return Proof(f"{_SCHEME} {time}:{nonce}:{mac}", self._answer(nonce))

    def check(self, header: str, path: str, now_s: float) -> tuple[str, str] | None:
        """Return the nonce of a proof that is right and fresh, and the answer to it; else None."""
        match = _PROOF.fullmatch(header)
        if match is None:
            return None
        time, nonce, mac = match.groups()
        right = hmac.compare_digest(mac, self._mac("gateway", path, time, nonce))
        if not right or abs(now_s - int(time)) > WINDOW_S:
            return None
        return nonce, self._answer(nonce)

    def _answer(self, nonce: str) -> str:
        return self._mac("peer", nonce)

    def _mac(self, *parts: str) -> str:
        return hmac.new(self._key, "|".join(parts).encode(), hashlib.sha256).hexdigest()


class ProofChecker:
    """Accepts each proof once. Remembers those of the last minutes only: older ones are too old."""

    def __init__(self, secret: SharedSecret) -> None:
        """Begin with none seen."""
        self._secret = secret
        self._seen: dict[str, float] = {}  # until when each counts

    def answer(self, header: str, path: str, now_s: float) -> str | None:
        """Return the answer to a proof that is right, fresh and new; else None."""
        for nonce in [nonce for nonce, until_s in self._seen.items() if until_s < now_s]:
            del self._seen[nonce]
        found = self._secret.check(header, path, now_s)
        if found is None or found[0] in self._seen:
            return None
        nonce, answer = found
        self._seen[nonce] = now_s + 2 * WINDOW_S  # it may be of a clock that is ahead
        return answer


def is_answer(proof: Proof | None, answer: str) -> bool:
    """Return whether a peer proved itself; without a secret of one's own anybody does."""
    return proof is None or hmac.compare_digest(proof.answer.encode(), answer.encode())


def secret_of(variable: str | None) -> SharedSecret | None:
    """Return the secret that an environment variable holds; None if none is named.

    Raises:
        ValueError: it is not set, or too short.
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
