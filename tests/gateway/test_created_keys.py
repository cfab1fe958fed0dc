"""API keys that operators create, rotate and revoke while gateways run."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from draftgate.gateway import keys as module
from draftgate.gateway.accounts import Account, Accounts, Role
from draftgate.gateway.app import Listening
from draftgate.gateway.created_keys import MOST_FORMER, Actor, KeyConflict, KeyNotFound
from draftgate.gateway.errors import Unavailable
from draftgate.gateway.keys import Keys
from draftgate.gateway.state.commands import ReadKeys, WriteKeys
from draftgate.gateway.state.guarded.store import open_store
from draftgate.gateway.state.memory.store import MemoryStore
from tests.examples import examples
from tests.gateway.harness import ScriptedBackend, client, eventually, running
from tests.gateway.redis_server import RedisServer

OPERATOR = Account("root", "sk-root", role=Role.OPERATOR)
FILE = """
teams: [{name: research, budget_usd: 5}]
keys:
  - {name: root, key: sk-root, role: operator}
  - {name: plain, key: sk-plain}
"""
BY = Actor("root", "00000000", "127.0.0.1")
NAMES = st.sampled_from(["a", "b", "c"])
GATEWAYS = st.integers(0, 2)
NUMBERS = st.integers(0, 9)


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


class KeyMachine(RuleBasedStateMachine):
    """Three gateways change keys in one store, whose memory may be lost."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 1_000_000.0
        self.store = MemoryStore()
        self.gateways = [
            Keys(Accounts([OPERATOR]), self.store, lambda: self.now_s) for _ in range(3)
        ]
        self.runner = asyncio.Runner()
        self.until_s: dict[str, dict[str, float]] = {}  # secrets of each key, and their ends
        self.former_s: dict[str, float] = {}  # the ends of earlier secrets by their rotation
        self.refused = {"sk-unknown"}

    def teardown(self) -> None:
        self.runner.close()

    @rule(gateway=GATEWAYS, name=NAMES, life_s=st.none() | st.integers(1, 40))
    def create(self, gateway: int, name: str, life_s: int | None) -> None:
        """Create a key, whose name must be new, or that of a key that has expired."""
        call = self.gateways[gateway].create(Account(name), life_s, BY)
        if max(self.until_s.get(name, {}).values(), default=0.0) > self.now_s:
            with pytest.raises(KeyConflict):
                self.runner.run(call)
            return
        self.refused |= set(self.until_s.get(name, {}))
        _, secret = self.runner.run(call)
        self.until_s[name] = {secret: self.now_s + life_s if life_s else float("inf")}
        assert self.gateways[gateway].accounts.find(secret) is not None

    @rule(gateway=GATEWAYS, name=NAMES, grace_s=st.integers(0, 20))
    def rotate(self, gateway: int, name: str, grace_s: int) -> None:
        """Rotate a key, which has to exist and not to have expired."""
        call = self.gateways[gateway].rotate(name, grace_s, BY)
        secrets = self.until_s.get(name)
        if secrets is None:
            with pytest.raises(KeyNotFound):
                self.runner.run(call)
            return
        last, end_s = list(secrets.items())[-1]
        live = [secret for secret, until_s in secrets.items() if until_s > self.now_s]
        if end_s <= self.now_s or (grace_s and len(live) > MOST_FORMER):
            with pytest.raises(KeyConflict):
                self.runner.run(call)
            return
        _, secret = self.runner.run(call)
        if grace_s:
            self.former_s[last] = self.now_s + grace_s
            secrets[last] = min(self.now_s + grace_s, end_s)
        else:
            self.refused |= set(secrets)
            secrets.clear()
        secrets[secret] = end_s
        assert self.gateways[gateway].accounts.find(secret) is not None

    @rule(gateway=GATEWAYS, name=NAMES, life_s=st.none() | st.integers(1, 40), priority=NUMBERS)
    def change(self, gateway: int, name: str, life_s: int | None, priority: int) -> None:
        """Change the expiry and a limit of a key, whose secrets stay the same."""
        keys = self.gateways[gateway]
        call = keys.change(name, {"priority": priority}, BY, expires_in_s=life_s)
        secrets = self.until_s.get(name)
        if secrets is None:
            with pytest.raises(KeyNotFound):
                self.runner.run(call)
            return
        self.runner.run(call)
        last = list(secrets)[-1]
        secrets[last] = self.now_s + life_s if life_s else float("inf")
        for earlier in secrets.keys() - {last}:
            secrets[earlier] = min(self.former_s[earlier], secrets[last])
        found = keys.accounts.find(last)
        assert found is not None
        assert found.priority == priority

    @rule(gateway=GATEWAYS, name=NAMES)
    def revoke(self, gateway: int, name: str) -> None:
        """Revoke a key, which is then refused at once by this gateway."""
        call = self.gateways[gateway].revoke(name, BY)
        if name not in self.until_s:
            with pytest.raises(KeyNotFound):
                self.runner.run(call)
            return
        self.runner.run(call)
        ended = set(self.until_s.pop(name))
        self.refused |= ended
        assert not any(map(self.gateways[gateway].accounts.find, ended))

    @rule(seconds=st.integers(1, 30))
    def wait(self, seconds: int) -> None:
        """Let time pass."""
        self.now_s += seconds

    @rule()
    def lose_memory(self) -> None:
        """Let the store lose all keys. The gateways notice it within their next readings."""
        self.store.handlers.update(MemoryStore().handlers)

    @rule(gateway=GATEWAYS)
    def restart(self, gateway: int) -> None:
        """Restart a gateway, which reads the keys when it starts."""
        self.gateways[gateway] = Keys(Accounts([OPERATOR]), self.store, lambda: self.now_s)

    @invariant()
    def exactly_valid_secrets_are_accepted(self) -> None:
        """After a second, every gateway accepts the secrets that are valid, and no others."""
        for _ in range(2):  # a store without memory gets the keys from the first reading
            for gateway in self.gateways:
                self.runner.run(gateway.sync())
        for gateway in self.gateways:
            find = gateway.accounts.find
            assert find("sk-root") is OPERATOR
            assert not any(map(find, self.refused))
            for name, secrets in self.until_s.items():
                for secret, until_s in secrets.items():
                    found = find(secret)
                    assert (found is not None) == (until_s > self.now_s)
                    assert found is None or found.name == name


def test_a_secret_is_accepted_exactly_while_it_is_valid() -> None:
    """A revoked, replaced or expired secret is never accepted, and any other one always is."""
    run_state_machine_as_test(
        KeyMachine, settings=settings(max_examples=examples(60), deadline=None)
    )


async def test_two_gateways_that_change_keys_at_once_lose_no_change() -> None:
    """Each of many concurrent changes holds, and the audit log has all of them."""

    class Slow(MemoryStore):
        async def call(self, command):
            await asyncio.sleep(0)
            found = self.apply(command)
            await asyncio.sleep(0)
            return found

    store = Slow()
    ours, theirs = (Keys(Accounts([OPERATOR]), store, lambda: 0.0) for _ in range(2))

    async def create(keys: Keys, name: str) -> str:
        while True:
            try:
                return (await keys.create(Account(name), None, BY))[1]
            except Unavailable:  # the other gateway was faster each time
                continue

    made = await asyncio.gather(
        *(create(keys, f"{who}{number}") for number in range(8)
          for who, keys in (("a", ours), ("b", theirs)))
    )  # fmt: skip
    for keys in (ours, theirs):
        await keys.sync()
        assert all(map(keys.accounts.find, made))
        assert len(keys.changes) == 16


async def test_a_change_whose_response_is_lost_is_found_in_the_store() -> None:
    """The operator gets the secret, although the store did not respond to the change itself."""

    class Losing(MemoryStore):
        async def call(self, command):
            found = self.apply(command)
            if isinstance(command, WriteKeys):
                raise module.StoreError("lost")
            return found

    keys = Keys(Accounts([OPERATOR]), Losing(), lambda: 0.0)
    _, secret = await keys.create(Account("a"), None, BY)
    assert keys.accounts.find(secret) is not None


async def test_the_store_makes_nobody_an_operator() -> None:
    """A key that gets the role of operators in the store is not accepted any more."""
    store = MemoryStore()
    keys = Keys(Accounts([OPERATOR]), store, lambda: 0.0)
    _, secret = await keys.create(Account("a"), None, BY)
    revision, text = await store.call(ReadKeys(""))
    book = json.loads(text)
    book["keys"]["a"]["account"]["role"] = "operator"
    assert await store.call(WriteKeys(revision, f"9{revision}", json.dumps(book)))
    await keys.sync()
    assert keys.accounts.find(secret) is None


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A key file with an operator."""
    path = tmp_path / "keys.yaml"
    path.write_text(FILE)
    return path


@pytest.fixture
async def gateway(file: Path, scripted: ScriptedBackend) -> AsyncIterator[Listening]:
    """A node with this file."""
    async with running(backends=[scripted], api_keys_file=str(file)) as found:
        yield found


@pytest.fixture
async def operator(gateway: Listening) -> AsyncIterator[httpx.AsyncClient]:
    """A client of an operator."""
    async with client(gateway) as http:
        http.headers.update(bearer("sk-root"))
        yield http


async def status(http: httpx.AsyncClient, key: str) -> int:
    return (await http.get("/v1/models", headers=bearer(key))).status_code


async def test_an_operator_creates_rotates_and_revokes_a_key(operator: httpx.AsyncClient) -> None:
    """Only the responses of the creation and the rotation have a secret."""
    settings = {"models": ["scripted"], "requests_per_minute": 9, "team": "research"}
    made = await operator.post("/keys", json={"name": "new", **settings})
    assert made.status_code == 200
    first = made.json()["key"]
    assert made.json() | settings == made.json()
    assert await status(operator, first) == 200
    rotated = (await operator.post("/keys/new/rotate", json={"grace_s": 60})).json()
    second = rotated["key"]
    assert len(rotated["former_until"]) == 1
    assert [await status(operator, key) for key in (first, second)] == [200, 200]
    third = (await operator.post("/keys/new/rotate")).json()["key"]
    assert [await status(operator, key) for key in (first, second, third)] == [401, 401, 200]

    listed = await operator.get("/keys")
    entries = {one["name"]: one for one in listed.json()["data"]}
    assert {name: one["source"] for name, one in entries.items()} == {
        "root": "file", "plain": "file", "new": "api",
    }  # fmt: skip
    digest = hashlib.sha256(third.encode()).hexdigest()
    assert entries["new"]["fingerprint"] == digest[:8]
    assert (await operator.get("/keys/new")).json() == entries["new"]
    for secret in (first, second, third, digest, "sk-root"):
        assert secret not in listed.text

    assert (await operator.delete("/keys/new")).json() == {"name": "new", "revoked": True}
    assert await status(operator, third) == 401
    assert (await operator.get("/keys/new")).status_code == 404
    changes = (await operator.get("/audit")).json()["data"]
    assert [one["action"] for one in changes] == ["revoked", "rotated", "rotated", "created"]
    assert {(one["key"], one["by"]) for one in changes} == {("new", "root")}
    assert changes[2]["grace_s"] == 60
    assert (await operator.get("/audit?limit=1")).json()["data"] == changes[:1]


async def test_an_operator_changes_a_key(operator: httpx.AsyncClient) -> None:
    """The settings in the body hold at once, and all others and the secret stay as they were."""
    settings = {"requests_per_minute": 9, "team": "research", "expires_in_s": 60}
    made = (await operator.post("/keys", json={"name": "new", **settings})).json()
    secret = made["key"]
    changed = await operator.patch("/keys/new", json={"models": ["other"], "budget_usd": 3})
    assert changed.status_code == 200
    del made["key"]
    assert changed.json() == {**made, "models": ["other"], "budget_usd": 3.0}
    body = {"prompt": "x", "max_tokens": 1}
    refused = await operator.post("/v1/completions", json=body, headers=bearer(secret))
    assert refused.json()["error"]["code"] == "forbidden"
    reset = {"models": None, "expires_in_s": None, "requests_per_minute": None}
    changed = await operator.patch("/keys/new", json=reset)
    assert changed.json() == {
        **made, "models": None, "expires_at": None, "requests_per_minute": None, "budget_usd": 3.0,
    }  # fmt: skip
    assert (await operator.get("/keys/new")).json() == changed.json()
    assert await status(operator, secret) == 200
    latest, first, _ = (await operator.get("/audit")).json()["data"]
    assert (latest["action"], set(latest["settings"])) == ("changed", set(reset))
    assert first["settings"] == ["models", "budget_usd"]
    assert latest["by"] == "root"


@pytest.mark.parametrize(
    ("name", "body", "wanted"),
    [
        ("new", {"budgt_usd": 1}, (400, "did you mean 'budget_usd'?")),
        ("new", {"name": "other"}, (400, "is not a setting of a key")),
        ("new", {}, (400, "names no setting")),
        ("new", {"role": "operator"}, (400, "operators are in the key file only")),
        ("new", {"team": "nobody"}, (400, "'nobody' does not exist")),
        ("new", {"budget_usd": -1}, (400, "budget_usd")),
        ("plain", {"priority": 1}, (409, "in the key file")),
        ("missing", {"priority": 1}, (404, "does not exist")),
    ],
)
async def test_a_change_that_is_not_possible_changes_nothing(
    operator: httpx.AsyncClient, name: str, body: dict[str, object], wanted: tuple[int, str]
) -> None:
    """The error says why, and the audit log has no entry."""
    await operator.post("/keys", json={"name": "new"})
    before = (await operator.get("/keys")).json()
    response = await operator.patch(f"/keys/{name}", json=body)
    assert response.status_code == wanted[0]
    assert wanted[1] in response.json()["error"]["message"]
    assert (await operator.get("/keys")).json() == before
    assert [one["action"] for one in (await operator.get("/audit")).json()["data"]] == ["created"]


async def test_an_expired_key_says_so_and_its_name_can_be_used_again(
    operator: httpx.AsyncClient, gateway: Listening
) -> None:
    """The error of the secret has the time, until another key has the name."""
    keys = gateway.node.keys
    begin_s = keys._now_s()
    secret = (await operator.post("/keys", json={"name": "new", "expires_in_s": 60})).json()["key"]
    keys._now_s = lambda: begin_s + 61
    await keys.sync()
    error = (await operator.get("/v1/models", headers=bearer(secret))).json()["error"]
    assert error["code"] == "invalid_api_key"
    assert error["message"].startswith("the API key expired at 20")
    again = await operator.post("/keys", json={"name": "new", "expires_in_s": 60})
    assert again.status_code == 200
    assert await status(operator, again.json()["key"]) == 200
    error = (await operator.get("/v1/models", headers=bearer(secret))).json()["error"]
    assert error["message"].startswith("the API key is not known")
    keys._now_s = lambda: begin_s + 200
    await keys.sync()
    await operator.patch("/keys/new", json={"expires_in_s": 600})
    assert await status(operator, again.json()["key"]) == 200


@pytest.mark.parametrize("method", ["rotate", "revoke", "create"])
async def test_keys_of_the_file_cannot_be_changed(operator: httpx.AsyncClient, method: str) -> None:
    """The error says that the key is in the file."""
    if method == "create":
        refused = await operator.post("/keys", json={"name": "plain"})
    elif method == "rotate":
        refused = await operator.post("/keys/plain/rotate", json={})
    else:
        refused = await operator.delete("/keys/plain")
    assert refused.status_code == 409
    assert "key file" in refused.json()["error"]["message"]
    assert await status(operator, "sk-plain") == 200


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"name": "a", "budget": 3}, "did you mean 'budget_usd'"),
        ({"name": "a", "share": 0}, "share"),
        ({"name": "a", "team": "researchh"}, "did you mean 'research'"),
        ({"name": "a/b"}, "name"),
        ({"name": "a", "role": "admin"}, "tenant, operator, metrics"),
        ({"name": "a", "role": "operator"}, "operators are in the key file only"),
        ({"name": "a", "expires_in_s": -1}, "expires_in_s"),
        ({}, "name"),
        ({"name": "a", "key": "sk-own"}, "key"),
    ],
)
async def test_an_invalid_setting_creates_no_key(
    operator: httpx.AsyncClient, body: dict[str, object], words: str
) -> None:
    """The error names the setting, also an unknown one, which might be a misspelt limit."""
    refused = await operator.post("/keys", json=body)
    assert refused.status_code == 400
    assert words in refused.json()["error"]["message"]
    assert len((await operator.get("/keys")).json()["data"]) == 2


async def test_only_operators_see_and_change_keys(gateway: Listening) -> None:
    """Other keys get status 403, and a node without keys has none to create."""
    calls = [
        ("GET", "/keys"), ("POST", "/keys"), ("GET", "/keys/root"), ("DELETE", "/keys/root"),
        ("POST", "/keys/root/rotate"), ("GET", "/audit"),
    ]  # fmt: skip
    async with client(gateway) as http:
        for method, path in calls:
            refused = await http.request(method, path, headers=bearer("sk-plain"))
            assert refused.status_code == 403, path
    async with running() as unguarded, client(unguarded) as http:
        refused = await http.post("/keys", json={"name": "a"})
        assert refused.status_code == 409
        assert "--api-keys-file" in refused.json()["error"]["message"]


async def test_a_key_of_the_file_comes_before_a_created_one_of_its_name(
    gateway: Listening, operator: httpx.AsyncClient, file: Path
) -> None:
    """A name that the file gets later belongs to the file, until the file gives it up."""
    secret = (await operator.post("/keys", json={"name": "new"})).json()["key"]
    for line, expected in (("  - {name: new, key: sk-file}\n", 401), ("", 200)):
        await asyncio.to_thread(file.write_text, FILE + line)
        gateway.node.key_files.request()

        async def applied(expected: int = expected) -> bool:
            return await status(operator, secret) == expected

        await eventually(applied)  # the node reads the file


async def test_a_created_key_expires_on_a_running_node(
    operator: httpx.AsyncClient,
) -> None:
    """The node refuses the key after its time, although nothing else changes."""
    made = await operator.post("/keys", json={"name": "brief", "expires_in_s": 0.2})
    assert made.json()["expires_at"] is not None

    async def refused() -> bool:
        return await status(operator, made.json()["key"]) == 401

    await eventually(refused)


async def test_keys_hold_for_all_gateways_of_a_pool_and_survive_a_restart(
    redis_server: RedisServer, file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A key that one gateway creates works on another one, also over a connection that is open, and
    is refused there after it was revoked. Redis has no secret, and the log has each change."""
    redis_server.command("FLUSHALL")
    caplog.set_level(logging.INFO, "draftgate")

    @asynccontextmanager
    async def member() -> AsyncIterator[Listening]:
        store = open_store(redis_server.url, "keys")
        async with running(store=store, api_keys_file=str(file)) as found:
            yield found
        await store.close()

    async with member() as first, client(first) as one:
        one.headers.update(bearer("sk-root"))
        secret = (await one.post("/keys", json={"name": "new"})).json()["key"]
        async with member() as second, client(second) as two:
            body = {"prompt": "x", "max_tokens": 1}

            async def generate() -> int:
                headers = bearer(secret)
                return (await two.post("/v1/completions", json=body, headers=headers)).status_code

            assert await generate() == 200
            two.headers.update(bearer("sk-root"))
            kept = (await one.post("/keys", json={"name": "kept"})).json()["key"]
            assert (await one.delete("/keys/new")).status_code == 200

            async def refused() -> bool:
                return await generate() == 401

            await eventually(refused)
            assert await status(two, kept) == 200
    async with member() as again, client(again) as http:
        assert [await status(http, key) for key in (kept, secret)] == [200, 401]
        audit = await http.get("/audit", headers=bearer("sk-root"))
        assert [one["key"] for one in audit.json()["data"]] == ["new", "kept", "new"]
    stored = json.dumps(redis_server.command("HGETALL", "draftgate:{keys}:keys"))
    assert kept not in stored
    assert hashlib.sha256(kept.encode()).hexdigest() in stored
    lines = [one for one in caplog.records if "an API key has changed" in one.getMessage()]
    assert len(lines) == 3
