"""API keys, with the account and the limits of each key.

A node without keys accepts all requests for one account. The keys come from a YAML file
(`--api-keys-file`), or without limits from `DRAFTGATE_API_KEYS`. The node loads the file again when
it changes (`gateway.reloading`).

    keys:
      - name: search            # the tenant, in metrics and logs
        key: sk-...             # or its SHA-256 in hex, to keep the secret out of the file:
        key_sha256: 9f86d0...
        share: 2                # weight in the pool (default 1)
        requests_per_minute: 600
        tokens_per_minute: 200000
        first_priority: -1      # most urgent class allowed (default 0; null: any)
        least_ttft_ms: 200      # tightest latency targets allowed
        least_tpot_ms: 20
      - name: prometheus
        key: sk-...
        role: metrics           # reads only /metrics (default: tenant)

Tenants see only their own decisions, and no metrics, which name all tenants. Keys with the role
`operator` see everything. All requests on a node without keys have this role.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from draftgate.policies.quotas import Quota
from draftgate.policies.types import ServiceLevel
from draftgate.policies.values import replace

Positive = Annotated[float, Meta(gt=0)]
Count = Annotated[int, Meta(ge=1)]

_DIGITS: Final = 64
"""Length of a SHA-256 in hex."""


class Role(StrEnum):
    """What a key may see."""

    TENANT = "tenant"
    OPERATOR = "operator"
    METRICS = "metrics"


class Account(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The tenant of a key, with its limits.

    The docstring of the module describes the fields. A limit of None means no limit.
    """

    name: Annotated[str, Meta(min_length=1, max_length=64)]
    key: str | None = None
    key_sha256: str | None = None
    share: Positive = 1.0
    requests_per_minute: Count | None = None
    tokens_per_minute: Count | None = None
    first_priority: int | None = 0
    least_ttft_ms: Positive | None = None
    least_tpot_ms: Positive | None = None
    role: Role = Role.TENANT

    @property
    def digest(self) -> str:
        """The SHA-256 of the key, in hex.

        Raises:
            ValueError: both or neither of key and digest are given, or one of them is malformed.
        """
        if (self.key is None) == (self.key_sha256 is None):
            raise ValueError(f"{self.name}: give either key or key_sha256")
        if self.key is not None:
            if not self.key:
                raise ValueError(f"{self.name}: the key is empty")
            return _sha256(self.key)
        digest = (self.key_sha256 or "").lower()
        if len(digest) != _DIGITS or any(c not in "0123456789abcdef" for c in digest):
            raise ValueError(f"{self.name}: key_sha256 must be {_DIGITS} hexadecimal digits")
        return digest

    @property
    def sees_tenant(self) -> str | None:
        """The tenant whose decisions the key may see, or None for all tenants."""
        return None if self.role is Role.OPERATOR else self.name

    @property
    def quota(self) -> Quota:
        """The limits per minute."""
        return Quota(self.requests_per_minute, self.tokens_per_minute)

    def capped(self, wanted: ServiceLevel) -> ServiceLevel:
        """Return a request's service level, limited to the values that the account permits."""
        first = self.first_priority
        if first is None and self.least_ttft_ms is None and self.least_tpot_ms is None:
            return wanted
        ttft_s, tpot_s = wanted.ttft_s, wanted.tpot_s
        if ttft_s is not None and self.least_ttft_ms is not None:
            ttft_s = max(ttft_s, self.least_ttft_ms / 1e3)
        if tpot_s is not None and self.least_tpot_ms is not None:
            tpot_s = max(tpot_s, self.least_tpot_ms / 1e3)
        priority = wanted.priority if first is None else max(wanted.priority, first)
        if priority == wanted.priority and ttft_s == wanted.ttft_s and tpot_s == wanted.tpot_s:
            return wanted
        return replace(wanted, ttft_s=ttft_s, tpot_s=tpot_s, priority=priority)


ANONYMOUS: Final = Account("", first_priority=None, role=Role.OPERATOR)
"""The account of all requests on a node without keys."""


class _File(msgspec.Struct, forbid_unknown_fields=True):
    """The YAML file."""

    keys: list[Account]


class Accounts:
    """The keys of a node.

    Attributes:
        required: whether requests need a key.
    """

    def __init__(self, accounts: Iterable[Account] = ()) -> None:
        """Index the accounts by key.

        Raises:
            ValueError: two accounts have the same name or key, an account is malformed, or no key
                is for clients.
        """
        self._by_digest: dict[str, Account] = {}
        for account in accounts:
            digest = account.digest
            if digest in self._by_digest:
                raise ValueError(f"{account.name}: another account has the same key")
            self._by_digest[digest] = account
        self.required = bool(self._by_digest)
        names = [account.name for account in self._by_digest.values()]
        if len(set(names)) < len(names):
            raise ValueError("two accounts have the same name")
        if names and all(one.role is Role.METRICS for one in self):
            raise ValueError("keys with the role metrics need an API key for clients")

    def __iter__(self) -> Iterator[Account]:
        """Yield the accounts."""
        return iter(self._by_digest.values())

    @property
    def quotas(self) -> dict[str, Quota]:
        """The quota of each tenant."""
        return {account.name: account.quota for account in self}

    def named(self, name: str) -> Account | None:
        """Return the account of a name, or None if no key has this name."""
        return next((account for account in self if account.name == name), None)

    def find(self, key: str) -> Account | None:
        """Return the account of a key, or None if the key is unknown."""
        # The time of a search by digest reveals nothing about a key.
        return self._by_digest.get(_sha256(key))


def read_accounts(
    path: Path | None, keys: Iterable[str] = (), metrics_keys: Iterable[str] = ()
) -> Accounts:
    """Return the accounts in a file, and an account without limits for each further key.

    Args:
        metrics_keys: keys with the role `metrics`.

    Raises:
        ValueError: the file cannot be read or is malformed, or no key is for clients.
    """
    roles = ((keys, "key", Role.TENANT), (metrics_keys, "metrics", Role.METRICS))
    listed = [
        Account(f"{prefix}-{fingerprint_of_key(key)}", key, role=role)
        for given, prefix, role in roles
        for key in given
        if key
    ]
    if path is None:
        return Accounts(listed)
    try:
        found = msgspec.yaml.decode(path.read_bytes(), type=_File)
        return Accounts([*found.keys, *listed])
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror or error}") from None
    except msgspec.ValidationError as error:
        raise ValueError(f"{path}: {error}") from None
    except msgspec.DecodeError as error:  # the message quotes the file, which has keys
        line = re.search(r"line \d+", str(error))
        raise ValueError(f"{path}: not YAML{f', {line[0]}' if line else ''}") from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def fingerprint_of_key(key: str) -> str:
    """Return the first 8 digits of the SHA-256 of a key, which identify the key in records."""
    return _sha256(key)[:8]


def _sha256(key: str) -> str:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()
