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
        models: [small, large]  # the only models allowed (default: all)
        priority: 1             # class of requests that state none (default 0)
        ttft_ms: 800            # latency targets of requests that state none (default: none)
        tpot_ms: 50
        first_priority: -1      # most urgent class allowed (default 0; null: any)
        least_ttft_ms: 200      # tightest latency targets allowed
        least_tpot_ms: 20
      - name: prometheus
        key: sk-...
        role: metrics           # reads only /metrics (default: tenant)

Keys and teams may have budgets in USD, for a calendar month or day in UTC. The costs of requests
follow from the prices of models, in USD per million tokens.

    prices:
      small: {input: 0.1, output: 0.4}
    teams:
      - name: research
        budget_usd: 500         # beyond it, requests are refused
        soft_budget_usd: 400    # beyond it, responses have a warning
    keys:
      - name: search
        key: sk-...
        team: research
        budget_usd: 10
        budget_period: day      # default: month

Tenants see only their own decisions, and no metrics, which name all tenants. Keys with the role
`operator` see everything. All requests on a node without keys have this role.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from datetime import datetime, timedelta
from difflib import get_close_matches
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Final, NamedTuple

import msgspec
from msgspec import Meta

from draftgate.backends.worker_config import TokenPrice
from draftgate.gateway.decoding_errors import allowed_values, yaml_problem
from draftgate.policies.quotas import Quota
from draftgate.policies.types import ServiceLevel
from draftgate.policies.values import replace

Positive = Annotated[float, Meta(gt=0)]
Count = Annotated[int, Meta(ge=1)]

_DIGITS: Final = 64
"""Length of a SHA-256 in hex."""

_DIGEST: Final = re.compile(f"[0-9a-f]{{{_DIGITS}}}")

_SHOWN_DIGITS: Final = 8

PER_USD: Final = 10**9
"""The unit of charges is a billionth of a USD, so that no request is too cheap to count."""


class Role(StrEnum):
    """What a key may see."""

    TENANT = "tenant"
    OPERATOR = "operator"
    METRICS = "metrics"


class Period(StrEnum):
    """The time for which a budget holds, which begins at midnight in UTC."""

    DAY = "day"
    MONTH = "month"

    def begin(self, now: datetime) -> datetime:
        """Return the begin of the period that contains a time."""
        day = now.replace(hour=0, minute=0, second=0, microsecond=0)
        return day if self is Period.DAY else day.replace(day=1)

    def end(self, now: datetime) -> datetime:
        """Return the begin of the next period."""
        begin = self.begin(now)
        # 32 days after the first day of a month are in the next month.
        return self.begin(begin + timedelta(days=1 if self is Period.DAY else 32))


class Budget(NamedTuple):
    """A budget of a key or a team, or only the period of its spending.

    Attributes:
        owner: `key NAME` or `team NAME`.
        hard_usd: spending beyond which requests are refused, or None.
        soft_usd: spending beyond which responses have a warning, or None.
    """

    owner: str
    hard_usd: float | None
    soft_usd: float | None
    period: Period

    @property
    def is_limited(self) -> bool:
        """Whether it has a limit, which requests have to be checked against."""
        return self.hard_usd is not None or self.soft_usd is not None


class Team(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Keys that share a budget."""

    name: Annotated[str, Meta(min_length=1, max_length=64)]
    budget_usd: Positive | None = None
    soft_budget_usd: Positive | None = None
    budget_period: Period = Period.MONTH


class KeySettings(msgspec.Struct, frozen=True, kw_only=True):
    """The role and the limits of a key.

    The docstring of the module describes the fields. A limit of None means no limit.
    """

    share: Positive = 1.0
    requests_per_minute: Count | None = None
    tokens_per_minute: Count | None = None
    models: tuple[str, ...] | None = None
    priority: int = 0
    ttft_ms: Positive | None = None
    tpot_ms: Positive | None = None
    first_priority: int | None = 0
    least_ttft_ms: Positive | None = None
    least_tpot_ms: Positive | None = None
    role: Role = Role.TENANT
    team: str | None = None
    budget_usd: Positive | None = None
    soft_budget_usd: Positive | None = None
    budget_period: Period = Period.MONTH


class Account(KeySettings, frozen=True, forbid_unknown_fields=True):
    """The tenant of a key, with its settings."""

    name: Annotated[str, Meta(min_length=1, max_length=64)]
    key: str | None = None
    key_sha256: str | None = None

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
            return digest_of_key(self.key)
        digest = (self.key_sha256 or "").lower()
        if not _DIGEST.fullmatch(digest):
            raise ValueError(f"{self.name}: key_sha256 must be {_DIGITS} hexadecimal digits")
        return digest

    @property
    def fingerprint(self) -> str:
        """The first digits of the digest, which identify the key in records."""
        return self.digest[:_SHOWN_DIGITS]

    @property
    def sees_tenant(self) -> str | None:
        """The tenant whose decisions the key may see, or None for all tenants."""
        return None if self.role is Role.OPERATOR else self.name

    @property
    def quota(self) -> Quota:
        """The limits per minute."""
        return Quota(self.requests_per_minute, self.tokens_per_minute)

    def allows(self, model: str) -> bool:
        """Return whether requests may use a model of this name."""
        return self.models is None or model in self.models

    def service_level(self, wanted: ServiceLevel, priority: int | None) -> ServiceLevel:
        """Return the service level of a request, with the account's defaults and limits.

        Args:
            wanted: the latency targets that the request states.
            priority: the priority that it states, or None.
        """
        priority = self.priority if priority is None else priority
        if priority:
            wanted = replace(wanted, priority=priority)
        if wanted.ttft_s is None and self.ttft_ms is not None:
            wanted = replace(wanted, ttft_s=self.ttft_ms / 1e3)
        if wanted.tpot_s is None and self.tpot_ms is not None:
            wanted = replace(wanted, tpot_s=self.tpot_ms / 1e3)
        return self.capped(wanted)

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
    teams: list[Team] = []
    prices: dict[str, TokenPrice] = {}


class Accounts:
    """The keys of a node.

    Attributes:
        required: whether requests need a key.
        prices: the prices by name of the model. An empty name means all other models.
    """

    def __init__(
        self,
        accounts: Iterable[Account] = (),
        teams: Iterable[Team] = (),
        prices: Mapping[str, TokenPrice] = MappingProxyType({}),
        further_keys: Mapping[str, Account] = MappingProxyType({}),
    ) -> None:
        """Index the accounts by key.

        Args:
            further_keys: other keys of the accounts, by digest.

        Raises:
            ValueError: two accounts or teams have the same name or key, an account is malformed or
                names an unknown team, or no key is for clients.
        """
        self.prices = prices
        self._teams = {team.name: team for team in teams}
        self._by_digest: dict[str, Account] = {}
        for account in accounts:
            digest = account.digest
            if (other := self._by_digest.get(digest)) is not None:
                raise ValueError(f"{account.name}: {other.name} has the same key")
            self._by_digest[digest] = account
        self.required = bool(self._by_digest)
        self._by_name = {account.name: account for account in self._by_digest.values()}
        if len(self._by_name) < len(self._by_digest):
            raise ValueError("two accounts have the same name")
        if self.required and all(one.role is Role.METRICS for one in self):
            raise ValueError("keys with the role metrics need an API key for clients")
        self._by_digest = {**further_keys, **self._by_digest}
        self._budgets = {one.name: found for one in self if (found := self._budgets_of(one))}

    def __iter__(self) -> Iterator[Account]:
        """Yield the accounts."""
        return iter(self._by_name.values())

    def with_further(self, further: Iterable[tuple[Account, Iterable[str]]]) -> Accounts:
        """Return these accounts and further ones, of which a name or key in use is left out.

        Teams that the further accounts name and that do not exist have no budget.

        Args:
            further: accounts, each with the digests of further keys.
        """
        added = [
            (account, digests)
            for account, digests in further
            if account.name not in self._by_name and account.digest not in self._by_digest
        ]
        teams = {one.team: Team(one.team) for one, _ in added if one.team} | self._teams
        keys = {digest: account for account, digests in added for digest in digests}
        accounts = [*self, *(account for account, _ in added)]
        return Accounts(accounts, teams.values(), self.prices, keys)

    @property
    def team_names(self) -> Collection[str]:
        """The names of the teams."""
        return self._teams.keys()

    @property
    def quotas(self) -> dict[str, Quota]:
        """The quota of each tenant."""
        return {account.name: account.quota for account in self}

    def budgets(self, account: Account) -> tuple[Budget, ...]:
        """Return the budgets of an account and of its team.

        Without prices, only those with limits are known.
        """
        return self._budgets.get(account.name, ())

    def all_budgets(self) -> tuple[Budget, ...]:
        """Return the budgets of all accounts and teams."""
        return tuple(dict.fromkeys(one for found in self._budgets.values() for one in found))

    def price(self, model: str) -> TokenPrice | None:
        """Return the price of a model, or None without one."""
        return self.prices.get(model) or self.prices.get("")

    def _budgets_of(self, account: Account) -> tuple[Budget, ...]:
        """Return the budgets of an account.

        Raises:
            ValueError: the team of the account does not exist.
        """
        owners: list[tuple[str, Account | Team]] = [(f"key {account.name}", account)]
        if account.team is not None:
            if account.team not in self._teams:
                known = ", ".join(self._teams) or "none"
                raise ValueError(f"{account.name}: unknown team {account.team!r}; known: {known}")
            owners.append((f"team {account.team}", self._teams[account.team]))
        budgets = [
            Budget(owner, one.budget_usd, one.soft_budget_usd, one.budget_period)
            for owner, one in owners
        ]
        return tuple(one for one in budgets if one.is_limited or self.prices)

    def find(self, key: str) -> Account | None:
        """Return the account of a key, or None if the key is unknown."""
        # The time of a search by digest reveals nothing about a key.
        return self._by_digest.get(digest_of_key(key))

    def named(self, name: str) -> Account | None:
        """Return the account of a tenant, or None if no account has this name."""
        return self._by_name.get(name)


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
    written = b""
    try:
        written = path.read_bytes()
        found = msgspec.yaml.decode(written, type=_File)
        if len({team.name for team in found.teams}) < len(found.teams):
            raise ValueError("two teams have the same name")
        if not found.keys and not listed:
            raise ValueError("there are no keys; without them, every client would be an operator")
        return Accounts([*found.keys, *listed], found.teams, found.prices)
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror or error}") from None
    except msgspec.ValidationError as error:
        raise ValueError(f"{path}: {_with_hint(str(error))}") from None
    except msgspec.DecodeError as error:
        raise ValueError(f"{path}: {yaml_problem(error.__context__, written)}") from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _with_hint(message: str) -> str:
    """Return an error of msgspec, with the most similar name or the values that are allowed."""
    if wrong := re.match("Invalid (?:enum )?value (.*) - at `\\$\\.(.*)`$", message):
        known = ", ".join(allowed_values(_File, wrong[2]))
        return f"{wrong[2]}: invalid value {wrong[1]}; known: {known}" if known else message
    found = re.match("Object contains unknown field `(.*?)`(?: - at `\\$\\.?(.*)`)?$", message)
    if found is None:
        return message
    kinds = {"keys": Account, "teams": Team, "prices": TokenPrice}
    kind = kinds.get((found[2] or "").partition("[")[0], _File)
    where = f" in {found[2]}" if found[2] else ""
    return f"unknown field {found[1]!r}{where}; {similar_name(found[1], kind.__struct_fields__)}"


def similar_name(unknown: str, known: Collection[str]) -> str:
    """Return a question for the known name that an unknown one probably means, or all of them."""
    near = get_close_matches(unknown, known, n=1)
    return f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known) or 'none'}"


def fingerprint_of_key(key: str) -> str:
    """Return the first 8 digits of the SHA-256 of a key, which identify the key in records."""
    return digest_of_key(key)[:_SHOWN_DIGITS]


def digest_of_key(key: str) -> str:
    """Return the SHA-256 of a key, in hex."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()
