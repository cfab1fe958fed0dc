"""Simulated devices that launch a step while the previous step runs."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest

from draftgate.backends.delta_reader import generate
from draftgate.backends.sim.backend import SimBackend
from draftgate.backends.sim.profile import load_profile
from draftgate.backends.testing import check_backend, make_request
from draftgate.backends.worker_config import WorkerConfig
from draftgate.lab.sim.environment import misjudged, slowed
from draftgate.lab.sim.virtual_time import loop_time_s, run_virtual
from draftgate.policies.types import SpeculationMode, SpeculationPlan

STEP_S, HOST_S, TOKENS = 10e-3, 4e-3, 60


@pytest.fixture
def profiles(tmp_path: Path) -> dict[bool, str]:
    """Profiles by whether the device launches ahead, with equal costs."""
    paths = {}
    for ahead in (False, True):
        path = tmp_path / f"{ahead}.json"
        profile = {
            "format": "profile/2", "device": "none", "model": "none", "dtype": "none",
            "source": "a test", "token_buckets": [4096], "step_s": [STEP_S], "kv_token_s": 0.0,
            "sequence_s": 0.0, "prefill_attention_s": 0.0,
            "host": {"step_s": HOST_S, "launches_ahead": ahead},
        }  # fmt: skip
        path.write_text(json.dumps(profile))
        paths[ahead] = str(path)
    return paths


def run_request(config: WorkerConfig, drafts: int) -> tuple[tuple[int, ...], list[float]]:
    """Return the tokens of a request, and the seconds between its deltas."""
    plan = SpeculationPlan("test", SpeculationMode.AUTO, "ngram", drafts, "a test")

    async def main() -> tuple[tuple[int, ...], list[float]]:
        backend = SimBackend(config)
        await backend.start()
        tokens: list[int] = []
        times_s = []
        request = make_request(backend, max_tokens=TOKENS, speculation=plan)
        async for delta in generate(backend, request):
            tokens += delta.token_ids
            times_s.append(loop_time_s())
        await backend.stop()
        return tuple(tokens), [after - before for before, after in pairwise(times_s)]

    return run_virtual(main())


def test_host_time_is_hidden_unless_the_previous_step_has_drafts(profiles: dict[bool, str]) -> None:
    """Without drafts, a device that launches ahead takes only the time of its steps.

    With drafts in every step, the device waits for the host as any other device does. The text is
    the same.
    """
    texts = set()
    for ahead, path in profiles.items():
        plain, gaps_s = run_request(WorkerConfig(speculation="off", profile=path), 0)
        assert gaps_s == pytest.approx([STEP_S if ahead else STEP_S + HOST_S] * (TOKENS - 1))
        config = WorkerConfig(speculation="fixed:2", profile=path, sim_acceptance=0.0)
        drafted, gaps_s = run_request(config, 2)
        # The first step after the prompt is planned ahead, and the last step has no drafts.
        assert gaps_s[1:-1] == pytest.approx([STEP_S + HOST_S] * (TOKENS - 3))
        assert gaps_s[0] == pytest.approx(STEP_S if ahead else STEP_S + HOST_S)
        texts |= {plain, drafted}
    assert len(texts) == 1


def test_device_that_launches_ahead_passes_conformance(profiles: dict[bool, str]) -> None:
    """Streams, cancellations, pauses and stops work while a planned step waits."""
    for speculation in ("off", "auto"):
        config = WorkerConfig(speculation=speculation, profile=profiles[True])
        run_virtual(check_backend(SimBackend(config)))


def test_scaled_profiles_launch_ahead_like_the_original(profiles: dict[bool, str]) -> None:
    """Neither a slower device nor a wrong belief changes how a device launches."""
    for ahead, path in profiles.items():
        profile = load_profile(path)
        assert slowed(profile, 2.0).host.launches_ahead is ahead
        assert misjudged(profile, 0.3, 1).host.launches_ahead is ahead
