"""The study of joint decisions: gateways that see workers by their last heartbeat."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec import structs
from typer.testing import CliRunner

from bench.studies.joint import JOINT, WAYS, Uncapped
from draftgate.backends.base import WorkerConfig
from draftgate.backends.sim.simulated import World
from draftgate.gateway.cli import app
from draftgate.gateway.cli.simulate.cluster import EVERYBODY_WAITS, Cluster, simulate
from draftgate.gateway.cli.simulate.gateways import Gateways, simulate_gateways
from draftgate.gateway.cli.simulate.seen import Price
from draftgate.loadgen.planning.plan import Load, make_plan
from draftgate.loadgen.types import PlannedRequest, Record
from draftgate.policies.registry import speculation_policy
from draftgate.policies.types import RequestView, WorkerLoad

CONFIG = WorkerConfig(
    profile="h100-8b", proposer="ngram", speculation="auto", max_num_seqs=64, max_model_len=4096
)


def burst(rate_rps: float, seconds: float) -> list[PlannedRequest]:
    """Chat requests that come at that rate."""
    load = Load(workload="chat", rate_rps=rate_rps, duration_s=seconds, seed=0)
    return list(make_plan(load, max_model_len=4096, lazily=True).requests)


def gateways(price: Price = Price.REPORTED, count: int = 3, speculation: str = "auto") -> Gateways:
    """Gateways over two workers."""
    cluster = Cluster(replace(CONFIG, speculation=speculation), 2, World(0), EVERYBODY_WAITS)
    return Gateways(cluster, speculation_policy("auto"), price, count)


def caps(records: list[Record]) -> list[int]:
    """The longest draft that each request was allowed."""
    return [
        (record.metrics or {})["speculative_decoding"]["max_draft_tokens"] for record in records
    ]


def test_gateways_share_workers_and_answer_everybody() -> None:
    """Each request is answered whole by one of the two workers, whichever gateway it came to, and
    the same simulation gives the same answers."""
    requests = burst(60.0, 2.0)
    records = simulate_gateways(gateways(), requests)
    assert [record.planned.index for record in records] == [one.index for one in requests]
    outputs = [(record.usage or {})["completion_tokens"] for record in records]
    assert outputs == [one.request.max_tokens for one in requests]
    placed = [(record.metrics or {})["worker_id"] for record in records]
    assert set(placed) == {"w-0", "w-1"}
    again = simulate_gateways(gateways(), requests)
    assert [record.end_s for record in again] == [record.end_s for record in records]


def test_leases_even_out_what_old_reports_do_not_tell() -> None:
    """In a burst within one heartbeat, of which no report tells, three gateways fill two workers as
    evenly as one gateway does that sees all at once."""
    requests = burst(150.0, 0.9)
    cluster = Cluster(CONFIG, 2, World(0))

    def share(records: list[Record]) -> float:
        placed = [(record.metrics or {})["worker_id"] for record in records]
        return placed.count("w-0") / len(placed)

    assert share(simulate_gateways(gateways(), requests)) == pytest.approx(0.5, abs=0.1)
    assert share(simulate(cluster, requests)) == pytest.approx(0.5, abs=0.1)


def test_a_burst_lowers_caps_before_any_report_tells_of_it() -> None:
    """Within the first heartbeat the reported price is that of idle workers; the projected one lets
    later requests of the burst draft less, and never more."""
    requests = burst(300.0, 0.8)
    reported, projected = (
        caps(simulate_gateways(gateways(price, speculation="fixed:4"), requests))
        for price in (Price.REPORTED, Price.PROJECTED)
    )
    assert sum(projected) < sum(reported)
    first, last = projected[: len(projected) // 4], projected[-len(projected) // 4 :]
    assert sum(last) / len(last) < sum(first) / len(first)


def test_without_caps_everybody_may_draft_the_longest() -> None:
    """At a price that no slot pays, but for who has nothing to draft with."""
    request = RequestView(100, 100, 0.0)
    busy = WorkerLoad(256, 9, 10, 100, 5.0, 0.3, ("ngram",))
    assert Uncapped().decide(request, busy).max_draft_tokens == 16
    assert Uncapped().decide(request, structs.replace(busy, proposers=())).max_draft_tokens == 0
    assert speculation_policy("auto").decide(request, busy).max_draft_tokens == 1


def test_the_command_compares_every_way_with_the_joint_one(tmp_path: Path) -> None:
    """JSON with a difference for each way, and a page."""
    out, html = tmp_path / "o.json", tmp_path / "o.html"
    flags = ["--clusters", "equal", "--speculation", "auto", "--rates", "10", "--seeds", "1"]
    flags += ["--duration", "1", "--arrival", "poisson", "--workers", "2", "--gateways", "2"]
    result = CliRunner().invoke(
        app, ["bench", "joint", *flags, "--json", str(out), "--html", str(html)]
    )
    assert result.exit_code == 0, result.output
    (cell,) = json.loads(out.read_text())["cells"]
    assert set(cell["ways"]) == set(WAYS)
    assert set(cell["to_joint"]) == set(WAYS) - {JOINT}
    for told in cell["ways"].values():
        assert 0.0 < told["attainment"]["mean"] <= 1.0
    assert "independent, by tokens" in html.read_text()
