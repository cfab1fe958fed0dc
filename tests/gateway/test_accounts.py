"""Tests of API keys: authentication, account limits and quotas."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import openai
import pytest

from draftgate.gateway.accounts import ANONYMOUS, Account, Accounts, read_accounts
from draftgate.gateway.app import Listening, StartError, build_node
from draftgate.gateway.config import ServeConfig
from draftgate.gateway.dispatch.quotas import quota_account
from draftgate.gateway.key_advice import use_accounts
from draftgate.gateway.state.commands import ReadTotals
from draftgate.policies.types import ServiceLevel
from tests.gateway.clients import openai_client
from tests.gateway.harness import ScriptedBackend, client, post_raw, running, until
from tests.gateway.troubles import AMPLE

BODY = {"prompt": "x", "max_tokens": 5}
KEYS = """
keys:
  - name: search
    key: sk-search
    share: 2
    first_priority: -1
    least_ttft_ms: 500
    least_tpot_ms: 20
  - name: boss
    key: sk-boss
    role: operator
  - name: batch
    key_sha256: {digest}
    requests_per_minute: 2
    tokens_per_minute: 40
""".format(digest=hashlib.sha256(b"sk-batch").hexdigest())

CHALLENGES = ["Bearer"]


@pytest.fixture
def keys_file(tmp_path: Path) -> Path:
    """A file with two accounts."""
    path = tmp_path / "keys.yaml"
    path.write_text(KEYS)
    return path


@pytest.fixture
async def guarded(keys_file: Path, scripted: ScriptedBackend) -> AsyncIterator[Listening]:
    """A node that requires keys, with a scripted worker."""
    async with running(backends=[scripted], api_keys_file=str(keys_file)) as gateway:
        yield gateway


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.mark.parametrize(
    "path", ["/v1/models", "/metrics", "/decisions", "/v1/completions", "/nowhere"]
)
async def test_all_informative_paths_require_a_key(guarded: Listening, path: str) -> None:
    """The server responds with OpenAI's 401 error to a request without a valid key on every guarded
    path. The response names the scheme of authentication."""
    async with client(guarded) as http:
        for headers in (
            {},
            bearer("sk-wrong"),
            {"authorization": "Bearer"},
            {"authorization": "Basic ???"},
        ):
            response = await http.get(path, headers=headers)
            assert response.status_code == 401
            assert response.json()["error"]["code"] == "invalid_api_key"
            assert response.headers.get_list("www-authenticate") == CHALLENGES
            assert "sk-" not in response.text


async def test_health_ready_and_version_need_no_key(guarded: Listening) -> None:
    """The server serves `/health`, `/ready` and `/version` without a key."""
    async with client(guarded) as http:
        for path in ("/health", "/ready", "/version"):
            assert (await http.get(path)).status_code == 200


async def test_account_caps_priority_and_targets_of_its_requests(
    guarded: Listening, scripted: ScriptedBackend
) -> None:
    """The worker receives the request with the account's tenant and the capped service level."""
    api = openai_client(guarded.url, "sk-search")
    headers = {"x-slo-ttft-ms": "10", "x-slo-tpot-ms": "100"}
    completion = asyncio.create_task(
        api.completions.create(
            model="scripted", **BODY, extra_body={"priority": -9}, extra_headers=headers
        )
    )
    request = await scripted.submitted.get()
    assert request.tenant == "search"
    assert request.service == ServiceLevel(0.5, 0.1, -1)
    scripted.emit(request, "hello", last=True)
    assert (await completion).choices[0].text == "hello"
    with pytest.raises(openai.AuthenticationError):
        await api.with_options(api_key="sk-unknown").models.list()
    await api.close()


async def test_exhausted_quota_returns_429_with_the_time_until_refill(
    guarded: Listening, scripted: ScriptedBackend
) -> None:
    """The server responds with 429 and the time until the quota covers the request."""
    async with client(guarded) as http:
        responses = [
            asyncio.create_task(http.post("/v1/completions", json=BODY, headers=bearer("sk-batch")))
            for _ in range(3)
        ]
        for _ in range(2):
            scripted.emit(await scripted.submitted.get(), "x", last=True)
        refused = next(a for a in await asyncio.gather(*responses) if a.status_code != 200)
        assert refused.status_code == 429
        assert refused.json()["error"]["code"] == "rate_limit_exceeded"
        assert 29 <= int(refused.headers["retry-after"]) <= 31
        assert 29_000 <= int(refused.headers["retry-after-ms"]) <= 31_000
        page = (await http.get("/metrics", headers=bearer("sk-boss"))).text
    metrics = [
        line
        for line in page.splitlines()
        if line.startswith("draftgate_refused") and "quota_requests" in line
    ]
    assert metrics == [
        'draftgate_refused_requests_total{kind="quota_requests",model_name="scripted"} 1.0'
    ]
    tokens = 'draftgate_tenant_tokens_total{model_name="scripted",tenant="batch"}'
    assert f"{tokens} {2 * (1 + 1)}.0" in page


async def test_exhausted_quota_refuses_a_stream_before_its_headers(
    guarded: Listening, scripted: ScriptedBackend
) -> None:
    """A stream beyond its quota gets status 429 with the retry time, and no event."""
    async with client(guarded) as http:
        for refused in (False, False, True):
            body, headers = {**BODY, "stream": True}, bearer("sk-batch")
            sent = asyncio.create_task(http.post("/v1/completions", json=body, headers=headers))
            if not refused:
                scripted.emit(await scripted.submitted.get(), "x", last=True)
            response = await sent
    assert response.status_code == 429
    assert response.json()["error"]["code"] == "rate_limit_exceeded"
    assert int(response.headers["retry-after"]) >= 29


async def test_request_larger_than_the_quota_is_a_client_error(guarded: Listening) -> None:
    """The server rejects a request that exceeds the whole quota and states the maximum."""
    async with client(guarded) as http:
        body = {**BODY, "max_tokens": 300}
        response = await http.post("/v1/completions", json=body, headers=bearer("sk-batch"))
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "max_tokens"
    assert "40" in response.json()["error"]["message"]


async def test_unused_quota_is_refunded(guarded: Listening, scripted: ScriptedBackend) -> None:
    """The ledger refunds the reserved tokens that a disconnected client did not use."""
    store = guarded.node.store
    account = quota_account("search", guarded.node.fleet.model_id)
    guarded.node.dispatcher.admission.quotas.change({"search": AMPLE})
    headers = "authorization: Bearer sk-search\r\n"
    body = {**BODY, "max_tokens": 20, "stream": True}
    _, writer = await post_raw(guarded, "/v1/completions", body, headers)
    request = await scripted.submitted.get()
    scripted.emit(request, "one two three")
    await until(lambda: guarded.node.in_flight == 1)
    reserved = request.most_tokens
    assert await store.call(ReadTotals(account)) == (reserved, 0, 0, reserved)
    await until(lambda: scripted.unread_tokens(request) == 0)
    writer.close()
    await until(lambda: guarded.node.in_flight == 0)
    used = len(request.prompt_ids) + 3
    assert await store.call(ReadTotals(account)) == (reserved, used, reserved - used, 0)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("keys: [{name: a}]", "give either key or key_sha256"),
        ("keys: [{name: a, key: x, key_sha256: y}]", "give either"),
        ("keys: [{name: a, key_sha256: xyz}]", "64 hexadecimal digits"),
        ("keys: [{name: a, key: x}, {name: b, key: x}]", "b: a has the same key"),
        ("keys: [{name: a, key: x}, {name: a, key: y}]", "same name"),
        ("keys: [{name: a, key: x, speed: 3}]", "unknown field 'speed'"),
        ("keys: [{name: a, key: x, share: 0}]", "share"),
        ("[", "keys.yaml"),
    ],
)
def test_malformed_keys_file_stops_the_start_with_one_line(
    tmp_path: Path, text: str, words: str
) -> None:
    """The start fails with one line that names the keys file and the problem."""
    path = tmp_path / "keys.yaml"
    path.write_text(text)
    with pytest.raises(StartError, match=r"keys\.yaml") as caught:
        build_node(ServeConfig(backend="sim", api_keys_file=str(path)))
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_keys_from_the_environment_have_accounts_of_their_own() -> None:
    """Each key from the environment gets an account whose name reveals no part of the key."""
    accounts = read_accounts(None, ["sk-one", "sk-two"])
    found = accounts.find("sk-one")
    assert found is not None
    assert "one" not in found.name
    assert accounts.find("sk-three") is None
    assert accounts.required
    assert not Accounts().required


def test_requests_are_not_capped_without_keys() -> None:
    """A node without keys accepts every requested priority and latency target."""
    requested = ServiceLevel(0.001, 0.001, -99)
    assert ANONYMOUS.capped(requested) == requested
    assert Account("a", "k").capped(requested) == ServiceLevel(0.001, 0.001, 0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "keys: [{name: a, key: b, shares: 2}]",
            r"unknown field 'shares' in keys\[0\]; did you mean",
        ),
        ("keyz: []", "unknown field 'keyz'; did you mean 'keys'\\?"),
        ("keys: [{name: a, key: b, zzzz: 2}]", "unknown field 'zzzz' in .*; known: name, key"),
        ("keys: []\nteams: [{name: t, budget: 1}]", "did you mean 'budget_usd'"),
        ("keys: []\nprices: {m: {input: 1, outputs: 2}}", "did you mean 'output'"),
        ("keys: []\nteams: [{name: t}]", "there are no keys"),
        ("keys: [{name: a, key: b, team: t}]", "a: unknown team 't'; known: none"),
        (
            "keys: [{name: a, key: b, role: nobody}]",
            r"keys\[0\].role: invalid value 'nobody'; known: .*operator",
        ),
        (
            "keys:\n  - name: a\n    key: *sk-secret\n",
            "not YAML, line 3: found undefined alias",
        ),
    ],
)
def test_a_key_file_with_an_unknown_name_or_without_keys_is_refused(
    text: str, message: str, tmp_path: Path
) -> None:
    """The error names the unknown field or team, and what it probably means. A file without keys
    would make the node open to all clients."""
    path = tmp_path / "keys.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        read_accounts(path)


async def test_defaults_of_a_key_apply_to_requests_that_state_none(
    tmp_path: Path, scripted: ScriptedBackend
) -> None:
    """A key sets the priority and the latency targets of its requests, unless they state their
    own."""
    path = tmp_path / "keys.yaml"
    path.write_text("keys: [{name: a, key: sk-a, priority: 3, ttft_ms: 5000, tpot_ms: 700}]")
    async with (
        running(backends=[scripted], api_keys_file=str(path)) as gateway,
        client(gateway) as http,
    ):

        async def service(body: dict[str, object], headers: dict[str, str]) -> ServiceLevel:
            headers = {**bearer("sk-a"), **headers}
            sent = asyncio.create_task(http.post("/v1/completions", json=body, headers=headers))
            request = await scripted.submitted.get()
            scripted.emit(request, "x", last=True)
            assert (await sent).status_code == 200
            return request.service

        assert await service(BODY, {}) == ServiceLevel(5.0, 0.7, 3)
        stated = {"x-slo-ttft-ms": "9000"}
        assert await service({**BODY, "priority": 1}, stated) == ServiceLevel(9.0, 0.7, 1)
        assert (await service({**BODY, "priority": 0}, {})).priority == 0


async def test_a_key_sees_only_the_workers_of_its_models(
    tmp_path: Path, scripted: ScriptedBackend
) -> None:
    """`/workers` leaves out the workers of models that the key may not use."""
    path = tmp_path / "keys.yaml"
    path.write_text(
        "keys: [{name: a, key: sk-a, models: [other]}, {name: b, key: sk-b, models: [scripted]},"
        " {name: c, key: sk-c}]"
    )
    settings = {"backends": [scripted], "further": {"other": ScriptedBackend()}}
    async with running(**settings, api_keys_file=str(path)) as gateway, client(gateway) as http:
        for key, models in (("sk-a", ["other"]), ("sk-b", ["scripted"]),
                            ("sk-c", ["scripted", "other"])):  # fmt: skip
            found = (await http.get("/workers", headers=bearer(key))).json()["workers"]
            assert [one["model"] for one in found] == models


PRICED = """
keys: [{name: a, key: x, models: [scripted], budget_usd: 3}]
prices: {scripted: {input: 1, output: 1}, '': {input: 1, output: 1}}
"""


@pytest.mark.parametrize(
    ("text", "fields"),
    [
        ("keys: [{name: a, key: x, budget_usd: 3}]", {"budgets": "key a"}),
        ("keys: [{name: a, key: x, models: [scriptd]}]",
         {"model": "scriptd", "hint": "did you mean 'scripted'?", "where": "models of the key a"}),
        ("keys: [{name: a, key: x}]\nprices: {zzz: {input: 1, output: 1}}",
         {"model": "zzz", "hint": "known: scripted", "where": "prices"}),
        (PRICED, None),
    ],
)  # fmt: skip
async def test_settings_of_keys_without_an_effect_cause_a_warning(
    tmp_path: Path,
    scripted: ScriptedBackend,
    caplog: pytest.LogCaptureFixture,
    text: str,
    fields: dict[str, str] | None,
) -> None:
    """The node warns at its start, and again when the file changes."""
    path = tmp_path / "keys.yaml"
    path.write_text(text)
    async with running(backends=[scripted], api_keys_file=str(path)) as gateway:
        gateway.node.key_files.request()
        await gateway.node.key_files.check(partial(use_accounts, gateway.node))
    found = [one.draftgate_fields for one in caplog.records if one.levelname == "WARNING"]
    assert len(found) == (0 if fields is None else 2)
    for one in found:
        assert one | fields == one


async def test_a_response_states_a_priority_that_differs_from_the_requested_one(
    guarded: Listening, scripted: ScriptedBackend
) -> None:
    """A request that asks for a more urgent priority than its key permits runs with the most urgent
    one, and the response says so."""
    async with client(guarded) as http:
        for wanted, noted in ((-9, "-1"), (-1, None), (2, None)):
            body = {**BODY, "priority": wanted}
            headers = bearer("sk-search")
            sent = asyncio.create_task(http.post("/v1/completions", json=body, headers=headers))
            scripted.emit(await scripted.submitted.get(), "x", last=True)
            assert (await sent).headers.get("x-draftgate-priority") == noted


async def test_a_key_uses_only_its_models(tmp_path: Path, scripted: ScriptedBackend) -> None:
    """A key with a list of models gets status 403 for another model, and does not see it."""
    path = tmp_path / "keys.yaml"
    path.write_text(
        "keys: [{name: a, key: sk-a, models: [other]}, {name: b, key: sk-b, models: [scripted]}]"
    )
    async with (
        running(backends=[scripted], api_keys_file=str(path)) as gateway,
        client(gateway) as http,
    ):
        refused = await http.post("/v1/completions", json=BODY, headers=bearer("sk-a"))
        assert refused.status_code == 403
        assert "it may use 'other'" in refused.json()["error"]["message"]
        for key, names in (("sk-a", []), ("sk-b", ["scripted"])):
            listed = (await http.get("/v1/models", headers=bearer(key))).json()["data"]
            assert [one["id"] for one in listed] == names
        unknown = await http.get("/v1/models/none", headers=bearer("sk-a"))
        assert "scripted" not in unknown.text
        sent = asyncio.create_task(http.post("/v1/completions", json=BODY, headers=bearer("sk-b")))
        scripted.emit(await scripted.submitted.get(), "x", last=True)
        assert (await sent).status_code == 200
