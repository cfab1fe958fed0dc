"""The study of rescheduling, and the baseline of early binding."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random

import pytest

from bench.simulation.rescheduling import LONGEST, VARIANTS, PowerLaw, draw_lengths, main
from draftgate.backends.sim.assembly import SimEnvironment
from draftgate.backends.sim.backend import SimBackend
from draftgate.backends.sim.virtual_time import run_virtual
from draftgate.backends.worker_config import WorkerConfig
from draftgate.gateway.cli.simulate.cluster import ADMIT_ALL, running_dispatcher, send
from draftgate.loadgen.types import Slo


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


@pytest.mark.long
def test_study_reports_every_variant(tmp_path: Path) -> None:
    """Each variant completes the same requests, only the variants with a policy move some, and a
    second run gives equal results."""
    found = []
    for name in ("first", "second"):
        file = tmp_path / f"{name}.json"
        given = "--instances 3 --requests 60 --rate 4 --json"
        main([*given.split(), str(file)])
        found.append(json.loads(file.read_text(encoding="utf-8"))["rows"])
    assert found[0] == found[1]
    moves = {row["variant"]: sum(row["moves"].values()) for row in found[0]}
    assert list(moves) == [variant.name for variant in VARIANTS]
    assert moves["early"] == moves["late"] == 0
    assert moves["late + least_time"] > 0
