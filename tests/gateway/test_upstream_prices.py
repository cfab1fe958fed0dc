"""Tests of the prices of upstreams, and of the costs of their responses."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from draftgate.backends.worker_config import TokenPrice
from draftgate.gateway.cli.explain import _as_text
from draftgate.gateway.config import ConfigError, effective_config
from draftgate.gateway.dispatch.decisions import read_decisions
from tests.gateway.harness import client, post_raw, until
from tests.gateway.upstreams import (
    DONE,
    LAST,
    TOKEN,
    USAGE,
    ScriptedUpstream,
    cut_after,
    forwarding,
    held,
    refusal,
    stream_of,
    upstream,
    whole,
)

PATH = "/v1/completions"
BODY = {"model": "theirs", "prompt": "x"}
PRICE = {"input": 2.0, "output": 10.0}
KEYS = "keys:\n  - name: team\n    key: sk-team\n    role: operator\n"
COST_USD = (5 * PRICE["input"] + 2 * PRICE["output"]) / 1e6
"""The cost of `WHOLE`."""


def priced(server: ScriptedUpstream, **settings: Any) -> ScriptedUpstream:
    """Return a server with the price of all its models, or of some of them by name."""
    models = settings.pop("price", {"": PRICE})
    server.settings = {
        "price": {name: TokenPrice(**price) for name, price in models.items()},
        **settings,
    }
    return server


def costs(page: str) -> dict[str, float]:
    """Return the lines of both metrics of costs, without their prefix and the node's model."""
    names = "draftgate_cost_usd", "draftgate_unknown_cost"
    lines = [line for line in page.splitlines() if line.startswith(names)]
    found = (line.removeprefix("draftgate_").rsplit(" ", 1) for line in lines)
    labels = str.maketrans({'"': None})
    return {
        name.replace(',model_name="theirs"', "").translate(labels): float(value)
        for name, value in found
    }


async def test_cost_is_in_the_log_the_decision_and_the_metrics(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The cost of a response follows from its usage and the price of its model."""
    caplog.set_level(logging.INFO, "draftgate")
    file = tmp_path / "decisions.jsonl"
    async with (
        upstream(whole) as a,
        upstream(whole) as b,
        forwarding(priced(a), priced(b), decisions_file=str(file), log_level="info") as gateway,
        client(gateway) as http,
    ):
        assert (await http.post(PATH, json=BODY)).status_code == 200
        (decision,) = (await http.get("/decisions")).json()["decisions"]
        assert decision["outcome"]["cost_usd"] == pytest.approx(COST_USD)
        assert costs((await http.get("/metrics")).text) == pytest.approx(
            {"cost_usd_total{model=theirs}": COST_USD}
        )
        async with gateway.node.beating():  # writes the file
            await until(lambda: file.read_bytes().count(b"\n") == 2)
    (line,) = [one.draftgate_fields for one in caplog.records if one.message == "request"]
    assert line["cost_usd"] == pytest.approx(COST_USD)
    (read,) = read_decisions(file)
    assert read.outcome is not None
    assert read.outcome.cost_usd == pytest.approx(COST_USD)
    assert "cost: 0.000030 USD" in _as_text(read, None)


async def test_costs_are_counted_by_tenant(tmp_path: Path) -> None:
    """The metric has the costs of each API key."""
    (keys := tmp_path / "keys.yaml").write_text(KEYS)
    async with (
        upstream(whole) as engine,
        forwarding(priced(engine), api_keys_file=str(keys)) as gateway,
        client(gateway) as http,
    ):
        http.headers["Authorization"] = "Bearer sk-team"
        for _ in range(3):
            assert (await http.post(PATH, json=BODY)).status_code == 200
        assert costs((await http.get("/metrics")).text) == pytest.approx(
            {"cost_usd_total{model=theirs,tenant=team}": 3 * COST_USD}
        )


async def test_streams_have_a_cost_if_their_upstream_reports_usage() -> None:
    """A stream without usage has an unknown cost, and cached tokens have their own price."""
    price = {**PRICE, "cached_input": 0.5}
    async with (
        upstream(stream_of(TOKEN, LAST, DONE)) as engine,
        forwarding(priced(engine, price={"": price})) as gateway,
        client(gateway) as http,
    ):
        for _ in range(2):
            assert (await http.post(PATH, json={**BODY, "stream": True})).status_code == 200
        unknown = {"unknown_cost_requests_total{model=theirs}": 2.0}
        assert costs((await http.get("/metrics")).text) == unknown
        engine.handler = stream_of(TOKEN, LAST, USAGE, DONE)
        assert (await http.post(PATH, json={**BODY, "stream": True})).status_code == 200
        expected = (5 * 2.0 + 2 * 0.5 + 3 * 10.0) / 1e6
        assert costs((await http.get("/metrics")).text) == pytest.approx(
            {**unknown, "cost_usd_total{model=theirs}": expected}
        )


async def test_models_have_their_own_prices() -> None:
    """The price of a model is found by the upstream's own name, also for an alias, and a model
    without a price has no cost."""
    prices = {"theirs": {"input": 1.0, "output": 1.0}}
    async with upstream(whole) as engine:
        engine.models = ("theirs", "other")
        server = priced(engine, price=prices, aliases={"chat": "theirs"})
        async with forwarding(server) as gateway, client(gateway) as http:
            for name in ("theirs", "chat", "other"):
                response = await http.post(PATH, json={**BODY, "model": name})
                assert response.status_code == 200
            assert costs((await http.get("/metrics")).text) == pytest.approx(
                {"cost_usd_total{model=theirs}": 2 * 7 / 1e6}
            )


async def test_failed_requests_have_no_cost() -> None:
    """Errors, and attempts that another upstream has to repeat, cost nothing."""
    async with (
        upstream(refusal(400)) as engine,
        forwarding(priced(engine)) as gateway,
        client(gateway) as http,
    ):
        assert (await http.post(PATH, json=BODY)).status_code == 400
        engine.handler = cut_after()
        assert (await http.post(PATH, json=BODY)).status_code == 502
        assert not costs((await http.get("/metrics")).text)


async def test_continued_stream_costs_what_its_last_upstream_reports() -> None:
    """The lost upstream reports no usage, so the cost is incomplete, and counted as unknown."""
    rest = stream_of(LAST, USAGE, DONE)
    body = {**BODY, "stream": True, "max_tokens": 9, "stream_options": {"include_usage": True}}
    async with (
        upstream(cut_after(TOKEN)) as a,
        upstream(rest) as b,
        forwarding(priced(a), priced(b)) as gateway,
        client(gateway) as http,
    ):
        assert DONE in (await http.post(PATH, json=body)).content
        assert (len(a.requests), len(b.requests) > 0) == (1, True)
        assert costs((await http.get("/metrics")).text) == pytest.approx(
            {
                "unknown_cost_requests_total{model=theirs}": 1.0,
                "cost_usd_total{model=theirs}": (7 * 2.0 + 3 * 10.0) / 1e6,
            }
        )


async def test_equal_upstreams_prefer_the_cheapest() -> None:
    """Among idle upstreams the cheapest gets the requests, and an upstream without a price is
    free. A busy upstream is not equal."""
    async with (
        upstream(whole) as a,
        upstream(whole) as b,
        forwarding(priced(a), priced(b, price={"": {"input": 1.0, "output": 1.0}})) as gateway,
        client(gateway) as http,
    ):
        for _ in range(4):
            assert (await http.post(PATH, json=BODY)).status_code == 200
        assert (len(a.requests), len(b.requests)) == (0, 4)
        b.handler = held()
        _, writer = await post_raw(gateway, PATH, BODY)
        await until(lambda: len(b.requests) == 5)
        assert (await http.post(PATH, json=BODY)).status_code == 200
        assert len(a.requests) == 1
        writer.close()
    async with (
        upstream(whole) as a,
        upstream(whole) as b,
        forwarding(priced(a), b) as gateway,
        client(gateway) as http,
    ):
        for _ in range(4):
            assert (await http.post(PATH, json=BODY)).status_code == 200
        assert (len(a.requests), len(b.requests)) == (0, 4)


def test_price_of_all_models_and_of_some() -> None:
    """The setting `price` is one price, or a mapping from models to prices."""
    one = {"input": 0.5, "output": 1.5}
    some = {"large": {"input": 5, "output": 15, "cached_input": 0.5}}
    servers = [{"url": "http://a", "price": one}, {"url": "http://b", "price": some}]
    a, b = effective_config({"upstream": servers}, {}).config.upstreams()
    assert a.price == {"": TokenPrice(input=0.5, output=1.5)}
    assert b.price == {"large": TokenPrice(input=5.0, output=15.0, cached_input=0.5)}


@pytest.mark.parametrize(
    ("price", "words"),
    [
        ({"input": -1, "output": 1}, ">= 0"),
        ({"input": 1}, "missing required field output"),
        ({"input": 1, "output": 1, "cached": 1}, "unknown field cached"),
        ({"large": 5}, "price"),
        (5, "price"),
    ],
)
def test_invalid_price_is_refused(price: object, words: str) -> None:
    """The error of an invalid price names the setting and the field."""
    with pytest.raises(ConfigError, match=f"--upstream: .*{words}"):
        effective_config({"upstream": [{"url": "http://a", "price": price}]}, {})
