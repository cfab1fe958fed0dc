"""The simulator as a backend: conformance, determinism, and drafts of a given quality."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from draftgate.backends.delta_reader import generate
from draftgate.backends.errors import BackendFailed, CheckpointError
from draftgate.backends.registry import backend_factory
from draftgate.backends.sim.backend import SimBackend
from draftgate.backends.sim.profile import load_profile
from draftgate.backends.testing import (
    check_backend,
    check_card,
    check_closing_frees,
    check_pace,
    check_replay,
    check_stop,
    check_streams_are_not_crossed,
    check_traces,
    collect,
    make_request,
)
from draftgate.backends.types import Capabilities, Pace
from draftgate.backends.worker_config import WorkerConfig
from draftgate.lab.sim.virtual_time import loop_time_s, run_virtual
from draftgate.policies.types import SpeculationMode, SpeculationPlan

ROOT = Path(__file__).parents[2]
INSTANT = ROOT / "bench/harness/instant.json"
SMALL_POOL = 16 * load_profile("cpu-demo").kv_token_bytes * 12  # a pool of twelve blocks


def drafting(most: int) -> SpeculationPlan:
    return SpeculationPlan("test", SpeculationMode.AUTO, "ngram", most, "a test")


def run_with(config: WorkerConfig, scenario):
    """Run `use` with a started simulator in virtual time."""

    async def main():
        backend = SimBackend(config)
        await backend.start()
        try:
            return await scenario(backend)
        finally:
            await backend.stop()

    return run_virtual(main())


@pytest.mark.parametrize(
    "config",
    [
        WorkerConfig(),
        WorkerConfig(speculation="off", profile="h100-8b"),
        WorkerConfig(speculation="fixed:4", max_num_seqs=2, max_step_tokens=7),
        WorkerConfig(sim_service_ms=5.0),
    ],
    ids=["default", "off", "tight", "service"],
)
def test_simulator_passes_conformance_in_virtual_time(config: WorkerConfig) -> None:
    """The simulator keeps the contract of `Backend` in virtual time."""
    run_virtual(check_backend(SimBackend(config)))


async def test_simulator_passes_conformance_in_real_time() -> None:
    """A simulator created by name keeps the contract on an ordinary event loop."""
    await check_backend(backend_factory("sim")(WorkerConfig()))


class KeepsCancelledRequests(SimBackend):
    def _end(self, request_id, cancelled):
        pass


class IgnoresStop(SimBackend):
    async def stop(self):
        pass


class LoadDependentText(SimBackend):
    """A simulator whose text depends on the load."""

    def submit(self, request, sink):
        seed = request.sampling.seed + self.load().running + self.load().waiting
        super().submit(replace(request, sampling=replace(request.sampling, seed=seed)), sink)


class IgnoresPace(SimBackend):
    def set_pace(self, request_id, pace, tpot_s=0.0):
        pass


class IgnoresResume(SimBackend):
    """A simulator that accepts only pauses, so that no paused request resumes."""

    def set_pace(self, request_id, pace, tpot_s=0.0):
        if pace is Pace.PAUSED:
            super().set_pace(request_id, pace)


class IgnoresTracing(SimBackend):
    def submit(self, request, sink):
        super().submit(replace(request, traced=False), sink)


class ExactWithoutNumericsClass(SimBackend):
    """A simulator that declares exact replay without a numerics class."""

    @property
    def card(self):
        return replace(super().card, numerics_class=None)


@pytest.mark.parametrize(
    ("backend_class", "check"),
    [
        (IgnoresPace, check_pace),
        (IgnoresResume, check_pace),
        (IgnoresTracing, check_traces),
        (KeepsCancelledRequests, check_closing_frees),
        (IgnoresStop, check_stop),
        (LoadDependentText, check_streams_are_not_crossed),
    ],
)
def test_conformance_suite_finds_broken_promises(backend_class, check) -> None:
    """A backend that breaks a promise fails the check of that promise."""

    async def main() -> None:
        backend = backend_class(WorkerConfig())
        await backend.start()
        try:
            with pytest.raises(AssertionError):
                await check(backend)
        finally:
            await SimBackend.stop(backend)

    run_virtual(main())


def test_conformance_suite_requires_a_numerics_class_for_exactness() -> None:
    """The suite rejects a backend that declares exact replay without a numerics class."""

    async def main() -> None:
        backend = ExactWithoutNumericsClass(WorkerConfig())
        await backend.start()
        try:
            with pytest.raises(AssertionError, match="numerics class"):
                check_card(backend)
        finally:
            await backend.stop()

    run_virtual(main())


@pytest.mark.parametrize("speculation", ["off", "fixed:1", "fixed:6", "auto"])
def test_text_is_the_same_under_any_policy_and_memory(speculation: str) -> None:
    """A request has the same text alone as with drafts, batching and preemption."""
    prompts = [f"def f{i}(x):" + " x" * i for i in range(8)]

    def request_of(backend, seed: int, most: int):
        plan = drafting(most)
        return make_request(backend, prompts[seed], seed=seed, max_tokens=40, speculation=plan)

    async def run_together(backend):
        requests = [request_of(backend, seed, 6) for seed in range(8)]
        return await asyncio.gather(*(collect(backend, each) for each in requests))

    async def run_alone(backend):
        return [await collect(backend, request_of(backend, seed, 0)) for seed in range(8)]

    crowded = WorkerConfig(speculation=speculation, kv_bytes=SMALL_POOL)
    assert run_with(crowded, run_together) == run_with(WorkerConfig(speculation="off"), run_alone)


def test_virtual_runs_are_deterministic() -> None:
    """The same arrivals give the same deltas at the same virtual times."""

    async def scenario(backend):
        log = []

        async def client(seed: int) -> None:
            await asyncio.sleep(seed * 0.7e-3)
            generation = make_request(backend, seed=seed, max_tokens=15, speculation=drafting(4))
            async for delta in generate(backend, generation):
                log.append((loop_time_s(), seed, delta.token_ids))  # noqa: PERF401 - in order

        await asyncio.gather(*map(client, range(10)))
        return log

    first, again = run_with(WorkerConfig(), scenario), run_with(WorkerConfig(), scenario)
    assert first == again
    assert first[-1][0] > 0


@pytest.mark.parametrize("acceptance", [0.0, 0.35, 0.8, 1.0])
def test_accepted_lengths_follow_the_given_probability(acceptance: float) -> None:
    """Accepted lengths have a geometric distribution (chi-square test, 1 in 10,000)."""
    most = 4

    async def scenario(backend):
        generation = make_request(backend, max_tokens=4000, speculation=drafting(most))
        last = None
        async for delta in generate(backend, generation):
            last = delta
        return last.outcome

    outcome = run_with(WorkerConfig(speculation="fixed:4", sim_acceptance=acceptance), scenario)
    chances = [acceptance**j * (1 - acceptance) for j in range(most)] + [acceptance**most]
    counts = [*outcome.acceptance_histogram, *[0] * (most + 1)][: most + 1]
    steps = outcome.num_spec_steps - 1  # The length limit may shorten the last step.
    expected = [steps * chance for chance in chances]
    chi_square = sum((c - e) ** 2 / e for c, e in zip(counts, expected, strict=True) if e > 0)
    assert chi_square < 23.5  # the 0.9999 quantile at 4 degrees of freedom
    assert all(c <= 1 for c, e in zip(counts, expected, strict=True) if e == 0)


def test_correct_drafts_save_time() -> None:
    """Good drafts save time, and rejected drafts cost `auto` almost nothing."""

    async def scenario(backend):
        await collect(backend, make_request(backend, max_tokens=400, speculation=drafting(8)))
        return loop_time_s()

    def seconds(speculation: str, acceptance: float) -> float:
        return run_with(WorkerConfig(speculation=speculation, sim_acceptance=acceptance), scenario)

    plain = seconds("off", 0.9)
    assert seconds("auto", 0.9) < 0.4 * plain
    assert seconds("auto", 0.0) < 1.02 * plain


def test_late_timers_do_not_add_up() -> None:
    """100 steps take their own time even if every sleep ends 0.5 ms late."""

    class LateBackend(SimBackend):
        def _run_after(self, seconds: float) -> asyncio.Handle:
            return super()._run_after(seconds + 0.5e-3 if seconds > 0 else 0.0)

    async def main() -> float:
        backend = LateBackend(WorkerConfig(speculation="off"))
        await backend.start()
        start_s = loop_time_s()
        await collect(backend, make_request(backend, max_tokens=100))
        await backend.stop()
        return loop_time_s() - start_s

    profile = load_profile("cpu-demo")
    step_s = profile.cost.seconds(tokens=1, kv_tokens=50, sequences=1)
    step_s += profile.host.step_s + profile.host.sequence_s
    assert run_virtual(main()) == pytest.approx(100 * step_s, rel=0.02)


def test_broken_worker_fails_its_streams() -> None:
    """An exception in the loop ends every stream with `BackendFailed` and fails later requests."""

    async def scenario(backend):
        streams = [generate(backend, make_request(backend, max_tokens=50)) for _ in range(2)]
        await anext(streams[0])
        backend._executor.execute = None
        for stream in streams:
            with pytest.raises(BackendFailed, match="TypeError"):
                async for _ in stream:
                    pass
        assert "TypeError" in backend.failure
        with pytest.raises(BackendFailed, match="TypeError"):
            generate(backend, make_request(backend))

    run_with(WorkerConfig(), scenario)


def test_card_describes_the_simulated_model() -> None:
    """The card has the model id and context of the shipped model, and a numerics class."""

    async def scenario(backend):
        return backend.card, backend.load()

    card, load = run_with(WorkerConfig(profile="h100-8b", max_model_len=100), scenario)
    assert (card.model_id, card.max_model_len) == ("draftgate-demo", 100)
    assert card.numerics_class == "sim:h100-8b"
    assert card.capabilities == Capabilities(
        exact=True,
        formats=True,
        options=("allowed_token_ids", "include_stop_str_in_output"),
    )
    assert load.proposers == ("ngram",)
    assert load.kv_blocks_total == 53_900_000_000 // (16 * 131072)


@pytest.mark.parametrize(
    ("profile", "kv_bytes", "whole"),
    [("cpu-demo", SMALL_POOL, 12), ("h100-8b", None, 53_900_000_000 // (16 * 131072))],
)
def test_worker_takes_its_share_of_the_memory(
    profile: str, kv_bytes: int | None, whole: int
) -> None:
    """A model that shares a device has its part of the KV blocks, and its own name."""

    async def scenario(backend):
        return backend.card.model_id, backend.load().kv_blocks_total

    config = WorkerConfig(profile=profile, kv_bytes=kv_bytes, memory_share=0.25, model_id="b")
    assert run_with(config, scenario) == ("b", whole // 4)


def test_worker_sleeps_while_all_requests_are_paused() -> None:
    """The worker plans no step during the pause and continues after a change of pace."""

    async def scenario(backend):
        requests = [make_request(backend, seed=seed, max_tokens=20) for seed in range(3)]
        alone = [await collect(backend, request) for request in requests]
        requests = [replace(request, request_id=f"{i}") for i, request in enumerate(requests)]
        reading = [asyncio.ensure_future(collect(backend, request)) for request in requests]
        await asyncio.sleep(5e-3)
        for request in requests:
            backend.set_pace(request.request_id, Pace.PAUSED)
        await asyncio.sleep(1.0)
        planned, plan = [], backend._worker.plan
        backend._worker.plan = lambda now_s: (planned.append(now_s), plan(now_s))[1]
        load = backend.load()
        await asyncio.sleep(20.0)
        assert planned == []
        assert (load.running, load.waiting, load.paused) == (0, 0, 3)
        assert load.kv_blocks_free == load.kv_blocks_total
        for request in requests:
            backend.set_pace(request.request_id, Pace.FULL)
        assert await asyncio.gather(*reading) == alone

    run_with(WorkerConfig(), scenario)


def test_logprobs_are_returned_on_request() -> None:
    """Each token has an entry that contains the token itself."""

    async def scenario(backend):
        generation = make_request(backend, max_tokens=20, speculation=drafting(4))
        generation = replace(generation, sampling=replace(generation.sampling, logprobs=2))
        return [d async for d in generate(backend, generation)]

    for delta in run_with(WorkerConfig(), scenario):
        assert tuple(entry.token_id for entry in delta.logprobs) == delta.token_ids


@pytest.mark.parametrize(
    ("config", "error", "words"),
    [
        (WorkerConfig(profile="h200"), ValueError, "no profile 'h200'"),
        (WorkerConfig(sim_acceptance=1.5), ValueError, "sim_acceptance"),
        (WorkerConfig(sim_service_ms=0.0), ValueError, "sim_service_ms"),
        (WorkerConfig(proposer="draft_model"), ValueError, "'ngram'"),
        (WorkerConfig(kv_bytes=1), ValueError, "kv_bytes"),
        (WorkerConfig(model="/nonexistent"), CheckpointError, "neither a directory"),
    ],
)
def test_start_rejects_a_wrong_setting(config, error, words) -> None:
    """`start` raises an error that names the setting."""

    async def main() -> None:
        with pytest.raises(error, match=words):
            await SimBackend(config).start()

    run_virtual(main())


def test_simulator_never_imports_torch() -> None:
    """`--backend sim` works on a machine without torch."""
    code = (
        "import sys, backends.sim.backend; sys.exit(bool({'torch', 'triton'} & set(sys.modules)))"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_replay_does_not_depend_on_a_restart() -> None:
    """A request gives the same output again on another simulator."""

    async def scenario(backend):
        await check_replay(backend)
        return await collect(backend, make_request(backend))

    assert run_with(WorkerConfig(), scenario) == run_with(WorkerConfig(profile="h100-8b"), scenario)
