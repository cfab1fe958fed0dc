"""The API keys of a node: those of its file, and those that operators create while it runs.

The created keys are in the store, so they hold for all gateways of a pool, and survive the restart
of a gateway. The store has their digests, and never a key. It has them as one text with a revision,
which each gateway reads once a second, so no request waits for the store. A gateway replaces the
text of the revision that it knows, and repeats a change if another gateway was faster.

A store that has lost its latest changes gets the keys again from any gateway that knows a later
revision. While the store does not respond, the keys stay as they are. The expiry of a key needs no
store.
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from draftgate.gateway.accounts import Account, Accounts, digest_of_key, read_accounts, similar_name
from draftgate.gateway.config import ServeConfig
from draftgate.gateway.created_keys import (
    MOST_CHANGES,
    MOST_FORMER,
    MOST_KEYS,
    Action,
    Actor,
    CreatedKey,
    FormerSecret,
    KeyBook,
    KeyChange,
    KeyConflict,
    KeyNotFound,
)
from draftgate.gateway.errors import Unavailable, invalid
from draftgate.gateway.file_safety import check_writers
from draftgate.gateway.logs import log
from draftgate.gateway.reloading import WatchedFiles
from draftgate.gateway.state.commands import ReadKeys, WriteKeys
from draftgate.gateway.state.store import Store, StoreError

SYNC_S: Final = 1.0
"""Interval at which a gateway reads the keys, after which a change holds everywhere."""

_book: Final = msgspec.json.Decoder(KeyBook)

_ATTEMPTS: Final = 5
"""Attempts of a change, each of which fails only if another gateway was faster."""

_SECRET_BYTES: Final = 32


class Keys:
    """All keys of a node.

    Attributes:
        accounts: the accounts whose keys are accepted now. Each change makes another object.
        on_change: a callback with these accounts.
    """

    def __init__(self, of_file: Accounts, store: Store, now_s: Callable[[], float]) -> None:
        """Accept the keys of a file, and the created ones from the first `sync` on.

        Args:
            now_s: the clock, in Unix time.
        """
        self.accounts = self._of_file = of_file
        self.on_change: Callable[[Accounts], None] = _ignore
        self._store = store
        self._now_s = now_s
        self._revision, self._book = "", KeyBook()
        self._next_end_s = math.inf  # Unix time at which the next secret expires
        self._hidden: set[str] = set()  # created keys whose name is in the file
        self._unreadable = ""  # the last revision that could not be read
        self._lock = asyncio.Lock()

    @property
    def created(self) -> Sequence[CreatedKey]:
        """The created keys, as this gateway knows them."""
        return tuple(self._book.keys.values())

    @property
    def of_file(self) -> Iterable[Account]:
        """The accounts of the file and of the environment."""
        return iter(self._of_file)

    @property
    def changes(self) -> Sequence[KeyChange]:
        """The latest changes, oldest first, as this gateway knows them."""
        return self._book.changes

    def use_file(self, accounts: Accounts) -> None:
        """Use other accounts of the file, for all further requests.

        Raises:
            ValueError: the node would begin or cease to require keys, which needs a restart.
        """
        if accounts.required != self._of_file.required:
            raise ValueError("a node cannot begin or cease to require API keys while it runs")
        self._of_file = accounts
        self._apply()

    async def sync(self) -> None:
        """Let secrets expire, and read the created keys if they have changed.

        A store that has lost the latest changes gets them again.

        Raises:
            StoreError: the store does not respond, or its keys cannot be read.
        """
        if self._next_end_s <= self._now_s():
            self._apply()
        async with self._lock:
            await self._sync()

    @asynccontextmanager
    async def syncing(self) -> AsyncIterator[None]:
        """Read the created keys once a second, and let secrets expire, until the block ends."""
        task = asyncio.create_task(self._sync_forever(), name="read the API keys")
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait({task})

    async def create(
        self, account: Account, expires_in_s: float | None, by: Actor
    ) -> tuple[CreatedKey, str]:
        """Create a key, and return it with its secret, which nothing stores.

        A key that has expired is replaced.

        Args:
            account: its settings, without a key.
            expires_in_s: seconds after which it expires, or None.

        Raises:
            KeyConflict: the name exists, there are too many keys, or the node needs no keys.
            InvalidRequest: the team does not exist, or the role is that of operators.
            Unavailable: the store does not respond.
        """
        name, secret, now_s = account.name, _new_secret(), self._now_s()
        self._check(account)
        expires_s = _end_s(expires_in_s, now_s)
        key = CreatedKey(_with_secret(account, secret), now_s, expires_s)

        def add(old: CreatedKey | None) -> CreatedKey:
            if old is not None and not old.has_expired(now_s):
                raise KeyConflict(f"the key {name!r} exists; choose another name", "name")
            if old is None and len(self._book.keys) >= MOST_KEYS:
                raise KeyConflict(f"there are {MOST_KEYS} keys, which is the maximum; revoke some")
            return key

        await self._change(Action.CREATED, name, add, by)
        return key, secret

    async def change(
        self,
        name: str,
        settings: Mapping[str, Any],
        by: Actor,
        expires_in_s: float | UnsetType | None = UNSET,
    ) -> CreatedKey:
        """Change the settings of a key, whose secrets stay, and return it.

        Args:
            settings: the new values of settings (`KeySettings`), by name.
            expires_in_s: seconds from now on after which it expires, or None for never. Without it,
                the expiry stays.

        Raises:
            KeyNotFound, KeyConflict: the key does not exist, or is in the file.
            InvalidRequest: the team does not exist, or the role is that of operators.
            Unavailable: the store does not respond.
        """
        now_s = self._now_s()

        def changed(old: CreatedKey | None) -> CreatedKey:
            if old is None:
                raise KeyNotFound(name)
            self._check(account := replace(old.account, **settings))
            expires_s = old.expires_s
            if expires_in_s is not UNSET:
                expires_s = _end_s(expires_in_s, now_s)
            return replace(old, account=account, expires_s=expires_s)

        names = (*settings, *(() if expires_in_s is UNSET else ("expires_in_s",)))
        return await self._change(Action.CHANGED, name, changed, by, settings=names)

    async def rotate(self, name: str, grace_s: float, by: Actor) -> tuple[CreatedKey, str]:
        """Give a key another secret, and return it with this secret.

        Args:
            grace_s: seconds for which the present secret is still accepted. With 0, all earlier
                secrets end at once.

        Raises:
            KeyNotFound, KeyConflict: the key does not exist, is in the file, has expired, or has
                too many earlier secrets.
            Unavailable: the store does not respond.
        """
        secret, now_s = _new_secret(), self._now_s()

        def rotated(old: CreatedKey | None) -> CreatedKey:
            if old is None:
                raise KeyNotFound(name)
            if not old.is_valid(now_s):
                raise KeyConflict(f"the key {name!r} has expired; set its expires_in_s first")
            former = old.former_at(now_s)
            if len(former) >= MOST_FORMER and grace_s:
                problem = f"the key {name!r} has {MOST_FORMER} earlier secrets that are accepted"
                raise KeyConflict(f"{problem}; wait for their end, or set grace_s to 0")
            last = FormerSecret(old.account.digest, now_s + grace_s)
            kept = (*former, last) if grace_s else ()
            return replace(old, account=_with_secret(old.account, secret), former=kept)

        return await self._change(Action.ROTATED, name, rotated, by, grace_s), secret

    async def revoke(self, name: str, by: Actor) -> None:
        """Delete a key, whose secrets are not accepted any more.

        Raises:
            KeyNotFound, KeyConflict: the key does not exist, or is in the file.
            Unavailable: the store does not respond.
        """

        def remove(old: CreatedKey | None) -> None:
            if old is None:
                raise KeyNotFound(name)

        await self._change(Action.REVOKED, name, remove, by)

    def _check(self, account: Account) -> None:
        """Check the team and the role of a created key."""
        name, teams = account.team, self._of_file.team_names
        if name is not None and name not in teams:
            raise invalid("team", f"{name!r} does not exist; {similar_name(name, teams)}")
        if account.sees_tenant is None:
            raise invalid("role", "must be tenant or metrics: operators are in the key file only")

    def why_refused(self, secret: str) -> str:
        """Return why a secret is not accepted."""
        digest, now_s = digest_of_key(secret), self._now_s()
        for key in self._book.keys.values():
            if digest in {key.account.key_sha256, *(one.sha256 for one in key.former)}:
                if key.has_expired(now_s):
                    end = datetime.fromtimestamp(key.expires_s or 0.0, UTC)
                    return f"the API key expired at {end:%Y-%m-%dT%H:%M:%SZ}"
                if digest != key.account.key_sha256:
                    return "the API key was replaced by another one"
        return "the API key is not known"

    async def _change(
        self,
        action: Action,
        name: str,
        edit: Callable[[CreatedKey | None], CreatedKey | None],
        by: Actor,
        grace_s: float | None = None,
        settings: tuple[str, ...] = (),
    ) -> CreatedKey:
        """Replace, add or remove a key, and return the key, or the removed one.

        Args:
            edit: returns the key in place of the present one, or None to remove it.
        """
        if not self._of_file.required:
            raise KeyConflict("this node needs no API keys; start it with --api-keys-file")
        if self._of_file.named(name) is not None:
            where = "in the key file or in the settings of the node"
            raise KeyConflict(f"the key {name!r} is {where}; change it there", "name")
        try:
            async with self._lock:
                for _ in range(_ATTEMPTS):
                    await self._sync()
                    old = self._book.keys.get(name)
                    new = edit(old)
                    changed = new or old
                    assert changed is not None
                    keys = {key: one for key, one in self._book.keys.items() if key != name}
                    if new is not None:
                        keys[name] = new
                    done = KeyChange(
                        datetime.fromtimestamp(self._now_s(), UTC),
                        action,
                        name,
                        changed.account.fingerprint,
                        *by,
                        grace_s=grace_s,
                        settings=settings,
                    )
                    changes = (*self._book.changes, done)[-MOST_CHANGES:]
                    if await self._write(KeyBook(keys, changes)):
                        _log_change(done)
                        return changed
        except StoreError as error:
            problem = f"the store of API keys does not respond ({error}); list the keys"
            raise Unavailable(f"{problem} before you try again", retry_after_s=1) from error
        raise Unavailable("other gateways are changing the keys; try again", retry_after_s=1)

    async def _write(self, book: KeyBook) -> bool:
        """Replace the keys in the store, and return whether they had the known revision."""
        revision = f"{_number(self._revision) + 1}-{secrets.token_hex(4)}"
        write = WriteKeys(self._revision, revision, _encode(book))
        try:
            written = await self._store.call(write)
        except StoreError:  # the store may have executed the command
            found, _ = await self._store.call(ReadKeys(revision))
            written = found == revision
        if written:
            self._use(revision, book)
        return written

    async def _sync(self) -> None:
        revision, text = await self._store.call(ReadKeys(self._revision))
        if revision == self._revision:
            return
        if text is None or _number(revision) < _number(self._revision):
            log(logging.WARNING, "the store has lost API keys, which this node restores")
            await self._store.call(WriteKeys(revision, self._revision, _encode(self._book)))
            return
        try:
            book = _book.decode(text)
        except msgspec.MsgspecError as error:
            if revision != self._unreadable:
                self._unreadable = revision
                kept = "cannot read the API keys of the pool, so the previous ones stay in use"
                log(logging.ERROR, kept, reason=str(error))
            raise StoreError("another version of Draftgate has written the keys") from None
        self._use(revision, book)

    async def _sync_forever(self) -> None:
        while True:
            await asyncio.sleep(min(SYNC_S, max(self._next_end_s - self._now_s(), 0.0)))
            with suppress(StoreError):  # the keys stay as they are
                await self.sync()

    def _use(self, revision: str, book: KeyBook) -> None:
        self._revision, self._book = revision, book
        self._apply()

    def _apply(self) -> None:
        """Accept the secrets that are valid now."""
        now_s, of_file = self._now_s(), self._of_file
        keys = [one for one in self._book.keys.values() if one.is_valid(now_s)]
        former = {one.account.name: one.former_at(now_s) for one in keys}
        ends = [one.expires_s for one in keys if one.expires_s is not None]
        ends += [secret.until_s for secrets_ in former.values() for secret in secrets_]
        self._next_end_s = min(ends, default=math.inf)
        self.accounts = of_file
        if of_file.required:
            self.accounts = of_file.with_further(
                (one.account, [secret.sha256 for secret in former[one.account.name]])
                for one in keys
            )
            hidden = {name for name in former if of_file.named(name) is not None}
            if hidden - self._hidden:
                why = "the key file has keys of these names"
                names = ", ".join(sorted(hidden))
                log(logging.WARNING, "some created keys are not accepted", keys=names, why=why)
            self._hidden = hidden
        self.on_change(self.accounts)


def key_files(config: ServeConfig) -> WatchedFiles[Accounts]:
    """Return the file of API keys, if one is configured, with the keys of the environment."""
    path = None if config.api_keys_file is None else Path(config.api_keys_file)
    paths = [] if path is None else [path]

    def read() -> Accounts:
        check_writers(paths, strict=config.strict)
        return read_accounts(path, config.api_keys, config.metrics_keys)

    return WatchedFiles("the API keys", paths, read)


def _log_change(done: KeyChange) -> None:
    fields = msgspec.to_builtins(done)
    del fields["at"]  # the log has the time itself
    log(logging.INFO, "an API key has changed", **fields)


def _new_secret() -> str:
    return f"sk-{secrets.token_urlsafe(_SECRET_BYTES)}"


def _end_s(life_s: float | None, now_s: float) -> float | None:
    return None if life_s is None else now_s + life_s


def _with_secret(account: Account, secret: str) -> Account:
    return replace(account, key_sha256=digest_of_key(secret))


def _encode(book: KeyBook) -> str:
    return msgspec.json.encode(book).decode()


def _number(revision: str) -> int:
    """Return the number of a revision, which has a random part in addition."""
    return int(revision.partition("-")[0] or 0)


def _ignore(_accounts: Accounts) -> None:
    """Ignore a change."""
