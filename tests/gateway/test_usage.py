"""The usage of keys by model, day and month."""

from __future__ import annotations

import asyncio
import csv
import logging
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path

import httpx
import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st

from draftgate.gateway.accounts import Account, Period
from draftgate.gateway.assembly import loop_time_s
from draftgate.gateway.cli.usage import run_usage
from draftgate.gateway.state.memory.store import MemoryStore
from draftgate.gateway.state.store import StoreError
from draftgate.gateway.usage import KEPT, REPORT_S, Usage, UsageRow
from draftgate.lab.sim.virtual_time import run_virtual
from tests.gateway.harness import ScriptedBackend, client, running

KEYS = """
prices:
  scripted: {input: 1000, output: 100000}
teams: [{name: research}]
keys:
  - {name: a, key: sk-a, team: research, budget_usd: 0.1}
  - {name: b, key: sk-b, models: [other]}
  - {name: root, key: sk-root, role: operator}
"""
DAY_S = 86_400.0
NOON = datetime(2026, 11, 30, 12, tzinfo=UTC).timestamp()
A, B = Account("a", "k"), Account("b", "l", team="t")


class Clock:
    """A clock that the test sets."""

    now_s = NOON

    def __call__(self) -> float:
        return self.now_s


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def totals(rows: list[UsageRow]) -> Counter[tuple[str, str, str]]:
    """Return the output tokens by day or month, key and model."""
    return Counter(
        {(f"{row.begins_at:%Y-%m-%d}", row.key, row.model): row.output_tokens for row in rows}
    )


EVENTS = st.lists(
    st.tuples(
        st.integers(0, 1),
        st.sampled_from([A, B]),
        st.sampled_from(["small", "large"]),
        st.sampled_from([0.0, 1.0, 0.4 * DAY_S, DAY_S]),
    ),
    max_size=25,
)


@given(events=EVENTS)
def test_days_and_months_are_the_sums_of_all_gateways(events) -> None:
    """Each request counts once in its day and its month, whichever gateway ran it."""

    async def check() -> None:
        def clock() -> float:
            return NOON + loop_time_s()

        store = MemoryStore(clock)
        gateways = [Usage(store, clock), Usage(store, clock)]
        days, months = Counter[tuple[str, str, str]](), Counter[tuple[str, str, str]]()
        for gateway, account, model, seconds in events:
            await asyncio.sleep(seconds)
            now = datetime.fromtimestamp(clock(), UTC)
            gateways[gateway].count(account, model, (7, 3, 5), None)
            days[f"{now:%Y-%m-%d}", account.name, model] += 5
            months[f"{now:%Y-%m-01}", account.name, model] += 5
        for usage in gateways:
            await usage.report()
        for usage in gateways:
            assert totals(await usage.rows(Period.DAY, KEPT[Period.DAY])) == days
            assert totals(await usage.rows(Period.MONTH, KEPT[Period.MONTH])) == months

    run_virtual(check())


async def test_usage_is_kept_for_a_bounded_time() -> None:
    """Days end after two months, and months after a year."""
    clock = Clock()
    usage = Usage(MemoryStore(clock), clock)
    usage.count(A, "m", (1, 0, 1), 0.5)
    await usage.report()
    clock.now_s += 61 * DAY_S
    assert await usage.rows(Period.DAY, 62)
    clock.now_s += 2 * DAY_S
    assert not await usage.rows(Period.DAY, 62)
    (row,) = await usage.rows(Period.MONTH, 13)
    assert (row.requests, row.cost_usd, row.unpriced_requests) == (1, 0.5, 0)
    clock.now_s += 400 * DAY_S
    assert not await usage.rows(Period.MONTH, 13)


def test_a_gateway_reports_by_itself_and_again_after_an_outage() -> None:
    """Counts that the store did not get are part of the next report."""
    responds = False

    class Silent(MemoryStore):
        async def call(self, command):
            if not responds:
                raise StoreError("no response")
            return self.apply(command)

    async def check() -> None:
        nonlocal responds
        store = Silent(lambda: NOON)
        ours, theirs = Usage(store, lambda: NOON), Usage(store, lambda: NOON)
        ours.count(A, "m", (1, 0, 1), None)
        with pytest.raises(StoreError):
            await ours.report()
        responds = True
        ours.count(A, "m", (1, 0, 1), None)
        await asyncio.sleep(2 * REPORT_S)
        (row,) = await theirs.rows(Period.DAY, 1)
        assert (row.requests, row.cost_usd, row.unpriced_requests) == (2, None, 2)

    run_virtual(check())


async def generate(
    http: httpx.AsyncClient, scripted: ScriptedBackend, key: str, model: str
) -> httpx.Response:
    body = {"prompt": "x", "max_tokens": 4, "model": model}
    sent = asyncio.create_task(http.post("/v1/completions", json=body, headers=bearer(key)))
    submitted = asyncio.create_task(scripted.submitted.get())
    await asyncio.wait({sent, submitted}, return_when=asyncio.FIRST_COMPLETED)
    if submitted.done():
        scripted.emit(submitted.result(), "one two", last=True)
    submitted.cancel()
    return await sent


async def test_usage_of_keys_and_models_is_in_the_api_and_in_the_csv(
    tmp_path: Path, scripted: ScriptedBackend, capsys: pytest.CaptureFixture[str]
) -> None:
    """An operator sees all keys, a tenant its own one, and each filter selects rows."""
    path, other = tmp_path / "keys.yaml", ScriptedBackend()
    path.write_text(KEYS)
    settings = {"backends": [scripted], "further": {"other": other}, "api_keys_file": str(path)}
    settings["metrics_keys"] = ("sk-metrics",)
    async with running(**settings) as gateway, client(gateway) as http:
        for key, backend, model in (
            ("sk-a", scripted, "scripted"),
            ("sk-root", scripted, "scripted"),
            ("sk-root", other, "other"),
            ("sk-b", other, "other"),
        ):
            assert (await generate(http, backend, key, model)).status_code == 200

        async def names(sender: str, **query: str) -> set[tuple[str, str, str]]:
            found = await http.get("/usage/history", params=query, headers=bearer(sender))
            return {(row["key"], row["team"], row["model"]) for row in found.json()["data"]}

        everything = {
            ("a", "research", "scripted"),
            ("root", "", "scripted"),
            ("root", "", "other"),
            ("b", "", "other"),
        }
        assert await names("sk-root") == await names("sk-root", period="month") == everything
        assert await names("sk-root", model="other", key="b") == {("b", "", "other")}
        assert await names("sk-root", team="research") == {("a", "research", "scripted")}
        assert await names("sk-b", key="a") == set()
        assert await names("sk-b") == {("b", "", "other")}
        for query in ({"period": "year"}, {"period": "month", "last": "14"}, {"last": "0"}):
            refused = await http.get("/usage/history", params=query, headers=bearer("sk-a"))
            assert refused.status_code == 400

        await asyncio.to_thread(run_usage, gateway.url, "sk-root", Period.DAY, 2)
        rows = list(csv.DictReader(capsys.readouterr().out.splitlines()))
        assert {(row["key"], row["team"], row["model"]) for row in rows} == everything
        costs = {(row["key"], row["model"]): row["cost_usd"] for row in rows}
        assert float(costs["a", "scripted"]) == pytest.approx(0.201)
        assert costs["b", "other"] == ""
        for key, why in (
            ("", "requires an API key: pass --api-key"),
            ("sk-wrong", "refuses the query: the API key is not known"),
            ("sk-metrics", "refuses the query: the role of this API key is metrics"),
        ):
            with pytest.raises(typer.Exit):
                await asyncio.to_thread(run_usage, gateway.url, key)
            assert why in capsys.readouterr().err


async def test_the_price_of_a_model_is_the_cost_of_its_requests(
    tmp_path: Path, scripted: ScriptedBackend
) -> None:
    """The record, the log and the metric of a request have its cost, without a budget, too."""
    path = tmp_path / "keys.yaml"
    path.write_text(KEYS)
    async with (
        running(backends=[scripted], api_keys_file=str(path)) as gateway,
        client(gateway) as http,
    ):
        assert (await generate(http, scripted, "sk-root", "scripted")).status_code == 200
        found = (await http.get("/records", headers=bearer("sk-root"))).json()["records"]
        assert found[0]["cost_usd"] == pytest.approx(0.201)
        page = (await http.get("/metrics", headers=bearer("sk-root"))).text
    (line,) = [one for one in page.splitlines() if one.startswith("draftgate_cost_usd_total{")]
    assert 'tenant="root"' in line
    assert float(line.split()[-1]) == pytest.approx(0.201)


async def test_a_request_that_a_key_forbids_is_counted_and_logged_with_its_key_and_model(
    tmp_path: Path, scripted: ScriptedBackend, caplog: pytest.LogCaptureFixture
) -> None:
    """A request beyond a budget counts as refused, for its tenant, too."""
    caplog.set_level(logging.INFO, "draftgate")
    path = tmp_path / "keys.yaml"
    path.write_text(KEYS)
    async with (
        running(backends=[scripted], api_keys_file=str(path)) as gateway,
        client(gateway) as http,
    ):
        statuses = [(await generate(http, scripted, key, "scripted")).status_code
                    for key in ("sk-a", "sk-a", "sk-b")]  # fmt: skip
        assert statuses == [200, 429, 403]
        page = (await http.get("/metrics", headers=bearer("sk-root"))).text
    lines = page.splitlines()
    for name, label in (("", ""), ("tenant_", 'tenant="a"')):
        start = f"draftgate_{name}refused_requests_total"
        counts = [one for one in lines if one.startswith(start) and 'kind="budget"' in one]
        assert [one.endswith(" 1.0") for one in counts if label in one] == [True]
    logged = [record.draftgate_fields for record in caplog.records if record.msg == "request"]
    refused = [(one["status"], one["tenant"], one["model"]) for one in logged[1:]]
    assert refused == [(429, "a", "scripted"), (403, "b", "scripted")]
