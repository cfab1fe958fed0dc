"""The cheap simulated worker, and its agreement with the worker of the simulator."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.simulation import scale
from bench.simulation.batch_backend import BatchBackend
from bench.simulation.batch_model import BatchLimits, BatchSequence, BatchWorker, State
from bench.simulation.large_pool import LargePool, run_pool
from bench.simulation.rescheduling import DEVICES, draw_lengths
from draftgate.backends.checkpoints import SHIPPED_MODEL
from draftgate.backends.kv_transfer.exchange import HOLD_S
from draftgate.backends.kv_transfer.format import chunk_of
from draftgate.backends.sim.assembly import SimEnvironment
from draftgate.backends.sim.profile import load_profile
from draftgate.backends.sim.virtual_time import run_virtual
from draftgate.backends.tokenizer import Tokenizer
from draftgate.backends.worker_config import WorkerConfig
from draftgate.gateway.cli.simulate.cluster import ADMIT_ALL, SimulatedCluster, simulate
from draftgate.loadgen.measuring.metrics import METRICS, values_of
from draftgate.loadgen.types import Slo
from draftgate.policies.costs.step_cost import StepCost

PROFILE = str(DEVICES / "a10-7b.json")
LIMITS = BatchLimits(StepCost((8, 512), (0.01, 0.05), kv_token_s=1e-6), 1000, max_sequences=8)

lengths = st.integers(1, 300)
actions = st.lists(
    st.tuples(st.sampled_from(("step", "add", "pause", "resume", "remove")), lengths)
)


def _drain(worker: BatchWorker) -> list[BatchSequence]:
    """Run a worker until it is idle, and return the sequences in order of their ends."""
    ended, now_s = list[BatchSequence](), 0.0
    while (step_s := worker.plan(now_s)) is not None:
        now_s += step_s
        ended += worker.complete().ended
    return ended


def test_a_lone_sequence_takes_the_steps_of_its_chunks_and_tokens() -> None:
    """A prompt of two chunks takes two steps, the last of which generates the first token."""
    worker, sequence = BatchWorker(LIMITS), BatchSequence(0, 700, 5)
    worker.add(sequence)
    assert _drain(worker) == [sequence]
    assert worker.steps == 2 + 4
    assert worker.load().kv_blocks_free == LIMITS.memory_tokens // 16


def test_the_youngest_sequence_makes_room() -> None:
    """When memory is full, the youngest sequence waits, and still generates all its tokens."""
    worker = BatchWorker(LIMITS)
    old, young = BatchSequence(0, 400, 200), BatchSequence(1, 400, 200)
    worker.add(old)
    worker.add(young)
    assert _drain(worker) == [old, young]
    assert (old.preemptions, young.preemptions) == (0, 1)
    assert (old.kept, young.kept) == (200, 200)


@given(st.lists(st.tuples(lengths, lengths), min_size=1, max_size=8), st.floats(0.0, 0.3))
def test_steps_that_are_planned_together_take_the_same_time(
    requests: list[tuple[int, int]], cut_s: float
) -> None:
    """Runs of steps end the same sequences at the same times as single steps, also if cut."""
    ends = []
    for most_s in (0.0, 0.1):
        worker, now_s, found = BatchWorker(LIMITS), 0.0, dict[int, float]()
        for key, (prompt, output) in enumerate(requests):
            worker.add(BatchSequence(key, prompt, output))
        while (step_s := worker.plan(now_s, most_s)) is not None:
            end_s = now_s + step_s
            if most_s and now_s <= cut_s < end_s:
                end_s = worker.cut(cut_s) or end_s
            now_s = end_s
            found |= dict.fromkeys((one.key for one in worker.complete().ended), now_s)
        ends.append(found)
    assert ends[1] == pytest.approx(ends[0], rel=1e-3)


@given(actions)
def test_sequences_keep_their_tokens_and_memory_stays_bounded(
    script: list[tuple[str, int]],
) -> None:
    """Whatever joins, pauses and leaves, each other sequence ends with exactly its tokens."""
    worker, open_, now_s = BatchWorker(LIMITS), list[BatchSequence](), 0.0
    stepping = False
    for number, (action, length) in enumerate(script):
        if action == "add":
            open_.append(BatchSequence(number, length, length))
            worker.add(open_[-1])
        elif action == "step":
            step_s = worker.plan(now_s)
            stepping = step_s is not None
            now_s += step_s or 0.0
            if stepping:
                assert worker.load().kv_blocks_free >= 0
                worker.complete()
        elif open_:
            one = open_[length % len(open_)]
            if action == "remove":
                worker.remove(one)
                open_.remove(one)
            else:
                (worker.pause if action == "pause" else worker.resume)(one)
    for one in open_:
        worker.resume(one)
    _drain(worker)
    assert all(one.state is State.ENDED and one.kept == one.output for one in open_)
    assert worker.load().kv_blocks_free == LIMITS.memory_tokens // 16


@pytest.mark.parametrize("rate_rps", [pytest.param(0.4, marks=pytest.mark.long), 2.0])
def test_latencies_agree_with_the_simulated_worker(rate_rps: float) -> None:
    """Mean latencies of two workers are within 5% of those of the production scheduler.

    The devices of both have exactly the times of the profile, and the gateway is the same.
    """
    drawn = draw_lengths(256, 256, 150, 0)
    found = run_pool(LargePool(2, 1, PROFILE), drawn, rate_rps, 0.0).finished
    config = WorkerConfig(
        profile=PROFILE,
        speculation="off",
        max_num_seqs=256,
        max_step_tokens=512,
        max_model_len=12_288,
    )
    exact = SimEnvironment(0, belief_error=0.0, roofline=False)
    records = simulate(
        SimulatedCluster(config, 2, exact, ADMIT_ALL),
        drawn.planned(rate_rps, Slo()),
        to_job=drawn.job,
    )
    assert len(found) == len(records) == 150
    for name in ("ttft_s", "tpot_s"):
        expected = fmean(values_of(METRICS[name], records))
        values = [getattr(one, name) for one in found]
        mean = fmean([value for value in values if value is not None])
        assert mean == pytest.approx(expected, rel=0.05)


def test_imports_take_free_memory_until_their_hold_ends() -> None:
    """A worker holds as many imported blocks as fit, and others when the hold has ended."""
    hashes = [index.to_bytes(4, "big") for index in range(2000)]

    async def scenario() -> list[int]:
        backend = BatchBackend(load_profile(PROFILE), Tokenizer(SHIPPED_MODEL))
        total = backend.load().kv_blocks_total
        first = await adopted(backend, hashes[: total + 1])
        second = await adopted(backend, hashes[total:])
        await asyncio.sleep(HOLD_S)
        third = await adopted(backend, hashes[total:])
        return [total - first, second, total - third]

    async def adopted(backend: BatchBackend, chain: list[bytes]) -> int:
        chunk = chunk_of(tuple(chain), memoryview(b""))
        return (await backend.adopt_blocks(chunk, b"")).blocks

    assert run_virtual(scenario()) == [0, 0, 0]


def test_the_simulation_of_a_pool_reports_its_metrics(tmp_path: Path) -> None:
    """`draftgate bench scale` reports latencies, balance, calls of the store and moves.

    Both policies get the same requests with each seed, and goodput is compared over the seeds.
    """
    out = tmp_path / "scale.json"
    size = "--workers 3 --gateways 2 --rate 1 --duration 8 --warm-up 2 --seeds 2"
    device = "--memory-tokens 2048 --longest 512"
    moves = "--parts pool --rescheduling off,least_time"
    scale.main([*f"{size} {device} {moves}".split(), "--json", str(out)])
    report = json.loads(out.read_text())
    found = [(row["seed"], row["rescheduling"]) for row in report["pool"]]
    assert found == [(0, "off"), (0, "least_time"), (1, "off"), (1, "least_time")]
    for row in report["pool"]:
        assert row["requests"] > 0
        assert row["spread_memory"] >= 1.0
        assert 0.0 < row["memory_mean"] <= row["memory_max"] <= 1.0
        assert 0.0 <= row["load_age_mean_s"] <= row["load_age_max_s"] <= 0.2
        assert row["store_calls_per_s"]["report"] == pytest.approx(3.0, rel=0.2)
    (change,) = report["compared_with_off"]
    assert (change["rescheduling"], change["seeds"]) == ("least_time", 2)
    low, high = change["interval"]
    assert low <= change["goodput_change"] <= high


def test_changes_of_goodput_have_students_interval() -> None:
    """The interval of three changes is their mean, plus and minus t of two degrees of freedom."""
    rows = [
        {"rescheduling": name, "seed": seed, "goodput_rps": goodput}
        for seed, (before, after) in enumerate([(10.0, 11.0), (10.0, 12.0), (20.0, 26.0)])
        for name, goodput in (("off", before), ("llumnix", after))
    ]
    (change,) = scale.compared_with_off(rows)
    assert change["goodput_change"] == pytest.approx(0.2)
    half = 4.303 * 0.1 / 3**0.5
    assert change["interval"] == pytest.approx([0.2 - half, 0.2 + half], abs=0.02)
