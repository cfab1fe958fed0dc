"""The study of rescheduling, and the baseline of early binding."""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from random import Random

import pytest

from bench.simulation.autoscaling import LOAD_S, Autoscaler
from bench.simulation.rescheduling import (
    LONGEST,
    VARIANTS,
    PowerLaw,
    Scenario,
    draw_lengths,
    draw_urgent,
    improvements,
    main,
)
from draftgate.backends.sim.assembly import SimEnvironment
from draftgate.backends.sim.backend import SimBackend
from draftgate.backends.sim.virtual_time import run_virtual
from draftgate.backends.worker_config import WorkerConfig
from draftgate.gateway.cli.simulate.cluster import (
    ADMIT_ALL,
    SimulatedCluster,
    running_dispatcher,
    send,
    simulate,
)
from draftgate.loadgen.types import PlannedRequest, RequestSpec, Slo
from draftgate.policies.scaling import DOWN_S, MEAN_S


@pytest.mark.parametrize("mean", [128, 512])
def test_lengths_have_their_mean(mean: int) -> None:
    """The drawn lengths have the requested mean, and none is longer than `LONGEST`."""
    random, lengths = Random(0), PowerLaw(mean)
    drawn = [lengths.draw(random) for _ in range(20_000)]
    assert sum(drawn) / len(drawn) == pytest.approx(mean, rel=0.06)
    assert 1 <= min(drawn) <= max(drawn) <= LONGEST


@pytest.mark.parametrize(("binding", "on_worker"), [("early", 5), ("late", 1)])
def test_early_binding_queues_on_the_worker(binding: str, on_worker: int) -> None:
    """With early binding, requests wait on a worker that runs one sequence. With late binding, they
    wait at the gateway."""

    async def scenario() -> int:
        environment = SimEnvironment(delivers_tokens=True)
        factory = partial(SimBackend, build=environment.build_worker)
        config = WorkerConfig(profile="h100-8b", speculation="off", max_num_seqs=1)
        rules = replace(ADMIT_ALL, binding=binding)
        drawn = draw_lengths(100, 1000, 5, 0)
        async with running_dispatcher(factory, [config], rules) as dispatcher:
            sent = asyncio.create_task(send(dispatcher, drawn.planned(1e6, Slo()), drawn.job))
            await asyncio.sleep(0.01)
            counted = 5 - len(dispatcher.queue)
            assert len(await sent) == 5
        return counted

    assert run_virtual(scenario()) == on_worker


def test_improvements_compare_equal_requests() -> None:
    """Ratios compare a variant with the same binding without moves, seed by seed. A metric that is
    0 has no ratio."""
    scenario = asdict(Scenario("a10-7b", 4, 100, "256/256", 3.0, "poisson", 0.0, False, 0))
    rows = [
        {**scenario, "seed": seed, "variant": variant, "prefill_mean_s": value, "loss_mean_s": 0.0}
        for seed, base in enumerate((1.0, 10.0))
        for variant, value in (("late", base), ("late + llumnix", base / 2), ("early", 7.0))
    ]
    (found,) = improvements(rows)
    assert found["prefill_mean_s"] == pytest.approx([0.5, 0.5, 0.5])
    assert found["variant"] == "late + llumnix"
    assert "loss_mean_s" not in found


def autoscaled(at_s: list[float], first: int) -> tuple[Autoscaler, float]:
    """Run requests of some seconds on three workers with one sequence each.

    Returns:
        The autoscaler, and the time of the last token.
    """
    config = WorkerConfig(profile="h100-8b", speculation="off", max_num_seqs=1)
    cluster = SimulatedCluster(config, 3, SimEnvironment(delivers_tokens=True))
    requests = [
        PlannedRequest(index, one, RequestSpec("", (), 800, index, "one"))
        for index, one in enumerate(at_s)
    ]
    scaler = Autoscaler(first)
    records = simulate(cluster, requests, beside=scaler.beside)
    return scaler, max(record.end_s for record in records)


def test_simulated_workers_follow_the_advice_down() -> None:
    """A pool that is idle for long keeps one of its workers, and the others cost nothing."""
    scaler, end_s = autoscaled([0.0, DOWN_S + 2 * MEAN_S], 3)
    assert scaler.changes >= 1
    assert end_s < scaler.worker_s < 3 * end_s - MEAN_S


@pytest.mark.long
def test_simulated_workers_follow_the_advice_up() -> None:
    """A pool with a long queue starts further workers, which cost from their start and serve once
    they have loaded."""
    requests = 20
    one, one_s = autoscaled([0.0], 1)
    scaler, end_s = autoscaled([0.0] * requests, 1)
    assert (one.changes, scaler.changes > 0) == (0, True)
    assert end_s < 0.9 * requests * one_s
    assert scaler.worker_s > requests * one_s + LOAD_S / 2


def test_urgent_requests_are_the_same_for_every_variant() -> None:
    """The urgent requests depend on the seed only, and have about their share."""
    urgent = draw_urgent(0.1, 2000, 0)
    assert urgent == draw_urgent(0.1, 2000, 0) != draw_urgent(0.1, 2000, 1)
    assert 140 <= len(urgent) <= 260
    assert not draw_urgent(0.0, 2000, 0)


@pytest.mark.long
def test_study_of_priorities_and_scaling_reports_classes_and_cost(tmp_path: Path) -> None:
    """With urgent requests and the autoscaler, rows have latencies of both classes and a cost
    between one instance and all."""
    file = tmp_path / "rows.json"
    given = "--instances 3 --requests 60 --lengths 256/256 --rates 1 --arrivals gamma:4"
    main([*given.split(), "--urgent", "0.3", "--autoscale", "--json", str(file)])
    for row in json.loads(file.read_text(encoding="utf-8"))["rows"]:
        assert 0.0 < row["urgent_prefill_mean_s"] < row["urgent_duration_s"]
        assert 1.0 <= row["mean_instances"] <= 3.0


@pytest.mark.long
def test_study_reports_every_variant(tmp_path: Path) -> None:
    """Each variant completes the same requests, only the variants with a policy move some, and a
    second run gives equal results."""
    found = []
    for name in ("first", "second"):
        file = tmp_path / f"{name}.json"
        given = "--instances 2 --requests 60 --lengths 256/256 --rates 6 --json"
        main([*given.split(), str(file)])
        found.append(json.loads(file.read_text(encoding="utf-8"))["rows"])
    assert found[0] == found[1]
    moves = {row["variant"]: sum(row["moves"].values()) for row in found[0]}
    assert list(moves) == [variant.name for variant in VARIANTS]
    assert moves["early"] == moves["late"] == 0
    assert moves["late + least_time"] > 0
