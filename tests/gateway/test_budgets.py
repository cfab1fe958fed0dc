"""Budgets of keys and teams, in USD."""

from __future__ import annotations

import asyncio
import csv
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path
from random import Random

import httpx
import pytest

from draftgate.gateway.accounts import Budget, Period
from draftgate.gateway.budgets import Budgets
from draftgate.gateway.cli.usage import run_usage
from draftgate.gateway.errors import QuotaExceeded
from draftgate.gateway.state.memory.store import MemoryStore
from tests.gateway.harness import ScriptedBackend, client, eventually, running

KEYS = """
prices:
  scripted: {input: 1000, output: 100000}
teams:
  - {name: research, budget_usd: 1, soft_budget_usd: 0.3}
keys:
  - {name: a, key: sk-a, team: research}
  - {name: b, key: sk-b, team: research, budget_usd: 0.2, budget_period: day}
  - {name: root, key: sk-root, role: operator}
"""
NOON = datetime(2026, 11, 30, 12, tzinfo=UTC).timestamp()
BODY = {"prompt": "x", "max_tokens": 4}


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


class Clock:
    """A clock that stands still until the test sets it."""

    now_s = NOON

    def __call__(self) -> float:
        return self.now_s


@pytest.mark.parametrize("seed", range(4))
async def test_two_gateways_exceed_a_budget_by_no_more_than_the_requests_in_flight(
    seed: int,
) -> None:
    """With random begins and ends on two gateways and a frozen clock, no request begins once the
    requests that have ended have used up the budget."""
    store, random, clock = MemoryStore(), Random(seed), Clock()
    gateways = [Budgets(store, clock), Budgets(store, clock)]
    budget = (Budget("key a", 1.0, None, Period.MONTH),)
    running: list[Budgets] = []
    spent = most_in_flight = refused = 0
    for _ in range(400):
        if running and random.random() < 0.5:
            gateway = running.pop(random.randrange(len(running)))
            gateway.charge(budget, 0.03)
            spent += 3
            await asyncio.sleep(0)  # the report
            continue
        gateway = random.choice(gateways)
        try:
            await gateway.check(budget)
        except QuotaExceeded:
            refused += 1
            assert spent >= 100
        else:
            assert spent < 100
            running.append(gateway)
            most_in_flight = max(most_in_flight, len(running))
    assert refused
    assert 100 <= spent < 100 + 3 * most_in_flight


async def test_the_last_charge_is_told_without_another_request() -> None:
    """The callback gets the spending when a charge reaches the store, for each budget."""
    budgets, told = Budgets(MemoryStore(), Clock()), dict[str, float]()
    budgets.on_spent = told.__setitem__
    day, month = Budget("key a", 1, None, Period.DAY), Budget("team t", 5, None, Period.MONTH)
    budgets.charge((day, month), 2.0)

    async def charged() -> bool:
        return told == {"key a": 2.0, "team t": 2.0}

    await eventually(charged)


async def test_a_budget_resets_with_its_period() -> None:
    """The error names the budget and its reset, after which requests run again."""
    clock = Clock()
    budgets = Budgets(MemoryStore(), clock)
    day, month = Budget("key a", 1, None, Period.DAY), Budget("team t", 5, None, Period.MONTH)
    budgets.charge((day, month), 2.0)
    with pytest.raises(QuotaExceeded, match=r"the key a of 1 USD per day .* 2026-12-01T00:00:00Z"):
        await budgets.check((day, month))
    budgets.charge((month,), 4.0)
    with pytest.raises(QuotaExceeded, match="the team t of 5 USD per month") as caught:
        await budgets.check((month,))
    assert caught.value.retry_after_s == 12 * 3600
    clock.now_s += 12 * 3600
    assert await budgets.check((day, month)) is None
    budgets.charge((day, month), 2.0)
    clock.now_s += 24 * 3600
    assert await budgets.check((day,)) is None


async def test_a_gateway_remembers_its_spending_while_the_store_does_not_respond() -> None:
    """Without the store, a gateway adds its own charges to the last known spending of others."""
    responds = True

    class Silent(MemoryStore):
        async def call(self, command):
            return await super().call(command) if responds else command.fallback

    store = Silent()
    ours, theirs = Budgets(store, Clock()), Budgets(store, Clock())
    budget = (Budget("key a", 1.0, None, Period.MONTH),)
    theirs.charge(budget, 0.6)
    await asyncio.sleep(0)
    assert await ours.check(budget) is None
    responds = False
    ours.charge(budget, 0.5)
    with pytest.raises(QuotaExceeded):
        await ours.check(budget)
    responds = True
    await asyncio.gather(ours.check(budget), return_exceptions=True)
    with pytest.raises(QuotaExceeded):
        await theirs.check(budget)


@pytest.fixture
async def http(tmp_path: Path, scripted: ScriptedBackend) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a node with budgets."""
    path = tmp_path / "keys.yaml"
    path.write_text(KEYS)
    settings = {"backends": [scripted], "api_keys_file": str(path)}
    async with running(**settings) as gateway, client(gateway) as opened:
        yield opened


async def respond(
    http: httpx.AsyncClient, scripted: ScriptedBackend, key: str, tokens: int = 1
) -> httpx.Response:
    """Send a request of some output tokens, each of which costs 0.1 USD."""
    sent = asyncio.create_task(http.post("/v1/completions", json=BODY, headers=bearer(key)))
    submitted = asyncio.create_task(scripted.submitted.get())
    await asyncio.wait({sent, submitted}, return_when=asyncio.FIRST_COMPLETED)
    if submitted.done():
        scripted.emit(submitted.result(), " ".join("a" * tokens), last=True)
    submitted.cancel()
    return await sent


async def test_a_request_beyond_a_budget_is_refused_with_the_budget_and_its_reset(
    http: httpx.AsyncClient, scripted: ScriptedBackend
) -> None:
    """A key and its team have budgets. The soft one adds a header, and the metric has the
    spending."""
    first = await respond(http, scripted, "sk-b")
    assert "x-draftgate-budget-warning" not in first.headers

    async def used_up() -> bool:
        return (await respond(http, scripted, "sk-b")).status_code == 429

    await eventually(used_up)
    refused = await respond(http, scripted, "sk-b")
    error = refused.json()["error"]
    assert error["message"].startswith("the budget of the key b of 0.2 USD per day is used up; it")
    assert int(refused.headers["retry-after"]) <= 86400
    second = await respond(http, scripted, "sk-a", tokens=2)
    assert second.status_code == 200

    async def warned() -> bool:
        found = await respond(http, scripted, "sk-a", tokens=4)
        text = found.headers.get("x-draftgate-budget-warning", "")
        return text.startswith("the team research has spent") and text.endswith("of 0.3 USD")

    await eventually(warned)
    metrics = (await http.get("/metrics", headers=bearer("sk-root"))).text
    spent = [line for line in metrics.splitlines() if line.startswith("draftgate_budget_spent_usd")]
    assert any('owner="key b"' in line for line in spent)
    assert any('owner="team research"' in line for line in spent)


async def test_usage_of_all_keys_is_exported_as_csv(
    tmp_path: Path, scripted: ScriptedBackend, capsys: pytest.CaptureFixture[str]
) -> None:
    """An operator sees all keys and teams, and a tenant its own key and team. The command prints
    them as CSV."""
    path = tmp_path / "keys.yaml"
    path.write_text(KEYS)
    settings = {"backends": [scripted], "api_keys_file": str(path)}
    async with running(**settings) as gateway, client(gateway) as http:
        await respond(http, scripted, "sk-b", tokens=3)

        async def export(key: str) -> dict[str, dict[str, str]]:
            await asyncio.to_thread(run_usage, gateway.url, key)
            rows = csv.DictReader(capsys.readouterr().out.splitlines())
            return {row["owner"]: row for row in rows}

        found = await export("sk-root")
        assert set(found) == {"key a", "key b", "key root", "team research"}
        assert float(found["key b"]["spent_usd"]) == pytest.approx(0.301)
        assert float(found["team research"]["spent_usd"]) == pytest.approx(0.301)
        assert float(found["key a"]["spent_usd"]) == 0.0
        assert (found["key b"]["period"], found["key b"]["budget_usd"]) == ("day", "0.2")
        assert set(await export("sk-b")) == {"key b", "team research"}


async def test_a_failed_request_costs_nothing(
    http: httpx.AsyncClient, scripted: ScriptedBackend
) -> None:
    """Requests that are refused before they run do not count."""
    for _ in range(30):
        bad = {"prompt": "x", "max_tokens": 10**6}
        assert (
            await http.post("/v1/completions", json=bad, headers=bearer("sk-b"))
        ).status_code == 400
    assert (await respond(http, scripted, "sk-b")).status_code == 200
