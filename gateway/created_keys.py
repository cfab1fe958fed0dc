"""The API keys that operators have created, and the changes of them, as the store keeps them."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Final, NamedTuple

import msgspec

from draftgate.gateway.accounts import Account
from draftgate.gateway.errors import InvalidRequest

MOST_KEYS: Final = 500
"""Maximum number of created keys. Reading 1,000 of them takes 10 ms (Intel Xeon, 2026-11-30)."""

MOST_CHANGES: Final = 1000
"""Number of changes that the audit log of keys has."""

MOST_FORMER: Final = 8
"""Maximum number of earlier secrets of a key that are still accepted."""


class KeyConflict(InvalidRequest, status=409, code="key_conflict"):
    """The state of a key does not permit the change."""


class KeyNotFound(InvalidRequest, status=404, code="key_not_found"):
    """No key has this name."""

    def __init__(self, name: str) -> None:
        super().__init__(f"the key {name!r} does not exist; /keys lists all keys")


class FormerSecret(msgspec.Struct, frozen=True):
    """A secret before a rotation, which is accepted until a Unix time."""

    sha256: str
    until_s: float


class CreatedKey(msgspec.Struct, frozen=True):
    """A key that an operator has created.

    Attributes:
        account: its settings, with the digest of the present secret.
        created_s: Unix time of its creation.
        expires_s: Unix time after which no secret of it is accepted, or None.
    """

    account: Account
    created_s: float
    expires_s: float | None = None
    former: tuple[FormerSecret, ...] = ()

    def is_valid(self, now_s: float) -> bool:
        """Return whether the present secret is accepted, which never is one of an operator.

        Otherwise, whoever can write to the store could become an operator.
        """
        return not self.has_expired(now_s) and self.account.sees_tenant is not None

    def has_expired(self, now_s: float) -> bool:
        """Return whether the key was valid before."""
        return self.expires_s is not None and self.expires_s <= now_s

    def former_at(self, now_s: float) -> tuple[FormerSecret, ...]:
        """Return the earlier secrets that are accepted."""
        return tuple(one for one in self.former if now_s < one.until_s)


class Action(StrEnum):
    """A change of a key."""

    CREATED = "created"
    CHANGED = "changed"
    ROTATED = "rotated"
    REVOKED = "revoked"


class Actor(NamedTuple):
    """Who changes a key: the name and the fingerprint of a key, and the address of its client."""

    name: str
    fingerprint: str
    client: str


class KeyChange(msgspec.Struct, frozen=True):
    """An entry of the audit log of keys.

    Attributes:
        key: the name of the key.
        fingerprint: the first 8 digits of the SHA-256 of its secret after the change, or of the one
            that was revoked.
        by: the name of the operator's key.
        by_fingerprint: the first 8 digits of the SHA-256 of that key.
        client: the address from which the operator sent the request.
        grace_s: seconds for which the secret before a rotation is still accepted.
        settings: the names of the settings that have changed.
    """

    at: datetime
    action: Action
    key: str
    fingerprint: str
    by: str
    by_fingerprint: str
    client: str
    grace_s: float | None = None
    settings: tuple[str, ...] = ()


class KeyBook(msgspec.Struct, frozen=True):
    """The created keys by name, and the latest changes, oldest first."""

    keys: dict[str, CreatedKey] = {}
    changes: tuple[KeyChange, ...] = ()
