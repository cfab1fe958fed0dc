"""Device models: the true duration of steps, and the costs that workers assume."""

from __future__ import annotations

from dataclasses import replace
from statistics import fmean, pstdev

import pytest

from draftgate.backends.core.drafts import Draft
from draftgate.backends.core.proposer import DraftRequest
from draftgate.backends.core.sequence import Sequence
from draftgate.backends.core.steps import SequenceWork, StepPlan
from draftgate.backends.sim.acceptance import ConstantAcceptance
from draftgate.backends.sim.device_model import ProfileDevice
from draftgate.backends.sim.engine_costs import HostCost
from draftgate.backends.sim.model import SimProposer
from draftgate.backends.sim.profile import load_profile, profile_names
from draftgate.backends.sim.tokens import SimulatedTokens
from draftgate.backends.token_ids import compact
from draftgate.backends.types import GenerationRequest, ResumedChoice, SamplingParams
from draftgate.lab.sim.environment import (
    OVERLAP_LOST,
    SPREAD,
    Roofline,
    RooflineDevice,
    StepNoise,
    misjudged,
)
from draftgate.policies.costs.step_cost import StepCost
from draftgate.policies.types import SpeculationMode, SpeculationPlan

PLAN = SpeculationPlan("test", SpeculationMode.AUTO, None, 0, "a test")


def work(start: int, fed: int, drafts: int = 0) -> SequenceWork:
    request = GenerationRequest("r", compact((1,) * (start + fed)), SamplingParams(10, 0), PLAN)
    sequence = Sequence.for_choice(0, request, ResumedChoice(0, ()))
    return SequenceWork(sequence, start, (1,) * fed, samples=True, draft=Draft((1,) * drafts))


def step(*parts: SequenceWork) -> StepPlan:
    return StepPlan(parts)


@pytest.mark.parametrize("name", profile_names())
def test_roofline_agrees_with_the_profile_at_its_ends_only(name: str) -> None:
    """The roofline matches the profile for the fewest and the most tokens, within a tile.

    The largest difference between these ends is between 3% and 50%.
    """
    cost = load_profile(name).cost
    roofline = Roofline.fit(cost)
    first, last = cost.token_buckets[0], cost.token_buckets[-1]
    tile_s = roofline.token_s * roofline.tile_tokens
    assert roofline.seconds(first) == pytest.approx(cost.step_s[0], abs=tile_s)
    assert roofline.seconds(last) == pytest.approx(cost.step_s[-1], abs=tile_s)
    off = [roofline.seconds(n) / cost.seconds(n) - 1 for n in range(first, last + 1)]
    assert 0.03 < max(map(abs, off)) < 0.5


@pytest.mark.parametrize("name", ["h100-8b", "h200-8b"])
def test_usual_cost_predicts_steps_of_decodes_without_noise(name: str) -> None:
    """The usual cost of a roofline is within 2% of the mean of noisy steps with and without
    drafts."""
    now_s = 0.0
    device = RooflineDevice(load_profile(name), 0, 0, lambda: now_s)
    cost = device.usual_cost(2048)
    for decodes, drafts in ((1, 0), (20, 3), (64, 0), (200, 2)):
        plan = step(*(work(300 + 7 * n, 1, drafts) for n in range(decodes)))
        durations = []
        for instant in range(4000):
            now_s = instant * 0.0072
            durations.append(device.step_s(plan, ()))
        # The median, because a few steps stall.
        assert cost.size_s(plan.size) == pytest.approx(sorted(durations)[2000], rel=0.02)


def test_roofline_has_stairs_and_a_knee() -> None:
    """Tokens that fit a tile are free.

    Another tile costs the share that does not overlap in a memory-bound step, and its full time in
    a compute-bound step.
    """
    roofline = Roofline.fit(load_profile("h100-8b").cost)
    tile = roofline.tile_tokens
    assert roofline.seconds(1) == roofline.seconds(tile) < roofline.seconds(tile + 1)
    ridge = roofline.memory_s / roofline.token_s
    assert tile < ridge < 512

    def tile_s(tokens: int) -> float:
        return roofline.seconds(tokens + tile) - roofline.seconds(tokens)

    assert tile_s(tile) == pytest.approx(OVERLAP_LOST * tile * roofline.token_s)
    assert tile_s(8 * int(ridge)) == pytest.approx(tile * roofline.token_s)


def test_attention_is_charged_for_draft_slots_as_for_prefills() -> None:
    """Each token after the first forms a pair with each KV token that the token reads."""
    assert step(work(100, 1)).size.pairs == 0
    assert step(work(100, 1, drafts=2)).size.pairs == 102 + 103
    assert step(work(100, 3)).size.pairs == 102 + 103
    size = step(work(100, 1, drafts=2), work(0, 4)).size
    assert (size.tokens, size.kv_tokens, size.pairs) == (7, 107, 102 + 103 + 2 + 3 + 4)
    profile = load_profile("h100-8b")
    device = ProfileDevice(profile)
    plain_s, verify_s = (device.step_s(step(work(9000, 1, drafts=n)), [()]) for n in (0, 7))
    table_s = profile.cost.seconds(8) - profile.cost.seconds(1)
    pairs_s = sum(range(9002, 9009)) * profile.cost.pair_s
    assert verify_s - plain_s == pytest.approx(table_s + pairs_s + 7 * profile.cost.kv_token_s)


def test_drafting_is_charged_once() -> None:
    """A depth costs the profile's time for the number of sequences when the draft is computed."""
    profile = load_profile("h100-8b")
    device = ProfileDevice(profile)
    device.draft("draft_model", sequences=4, depth=3)
    device.draft("ngram", sequences=4, depth=8)
    ngram = profile.draft["ngram"]
    expected_s = 3 * profile.draft["draft_model"].depth_s(4) + ngram.call_s + 4 * ngram.sequence_s
    assert device.pop_host_s(4) == pytest.approx(expected_s)
    assert device.pop_host_s(4) == 0.0


def test_simulated_proposer_learns_the_cost_of_a_depth() -> None:
    """A proposer that believes twice the true cost measures its drafts and corrects the belief."""
    true = load_profile("h100-8b").draft["draft_model"]
    believed = replace(true, depths=StepCost((1, 4), (2 * true.depth_s(1), 2 * true.depth_s(4))))
    tokens = SimulatedTokens(range(256))
    proposer = SimProposer(
        "draft_model",
        tokens,
        ConstantAcceptance(tokens, 0.5),
        believed,
        ProfileDevice(load_profile("h100-8b")),
    )
    requests = [DraftRequest(work(100, 1).sequence, 4) for _ in range(4)]
    assert proposer.depth_s(4) == pytest.approx(2 * true.depth_s(4))
    for _ in range(100):
        proposer.propose(requests)
    assert proposer.depth_s(4) == pytest.approx(true.depth_s(4), rel=0.05)


def test_host_time_of_a_step_grows_with_its_sequences() -> None:
    """Every step charges the host's time per step and per sequence, with or without drafts."""
    profile = replace(load_profile("cpu-demo"), host=HostCost(step_s=1e-4, sequence_s=1e-6))
    device = ProfileDevice(profile)
    assert device.pop_host_s(16) == pytest.approx(1.16e-4)
    assert device.pop_host_s(1) == pytest.approx(1.01e-4)


def test_noise_depends_on_instant_and_device() -> None:
    """The noise has mean 1 and the configured spread, and depends only on seed and device."""
    instants = [(n + 0.5) * 1e-3 for n in range(20_000)]

    def noise_factors(seed: int, index: int) -> list[float]:
        weather = StepNoise(1e-3, seed, index)
        return [weather.factor(at_s) for at_s in instants]

    factors = noise_factors(1, 0)
    assert fmean(factors) == pytest.approx(1.0, abs=0.002)
    assert pstdev(factors) == pytest.approx(SPREAD, rel=0.05)
    assert factors == noise_factors(1, 0) != noise_factors(1, 1)
    assert factors != noise_factors(2, 0)
    weather = StepNoise(1e-3, 1, 0)
    steps = [weather.step_s(1e-3, at_s) for at_s in instants]
    stalls = [s - 1e-3 * f for s, f in zip(steps, factors, strict=True)]
    assert 0 < sum(stall > 1e-9 for stall in stalls) < 60


def test_noise_of_a_step_depends_on_the_clock() -> None:
    """A step has the same noise at the same instant and other noise at other instants."""
    now_s = 0.0
    device = RooflineDevice(load_profile("h100-8b"), 0, 0, lambda: now_s)
    plan = step(work(100, 1))
    first_s = device.step_s(plan, [()])
    assert first_s == device.step_s(plan, [()])
    now_s = 1.0
    assert first_s != device.step_s(plan, [()])


@pytest.mark.parametrize("name", profile_names())
def test_assumed_costs_have_the_stated_error(name: str) -> None:
    """Every assumed cost is 30% too large or too small, and the table never falls."""
    profile = load_profile(name)
    believed_costs = set()
    for seed in range(12):
        believed = misjudged(profile, 0.3, seed)
        ratio = believed.cost.step_s[0] / profile.cost.step_s[0]
        assert ratio == pytest.approx(0.7) or ratio == pytest.approx(1.3)
        if profile.cost.kv_token_s:
            ratio = believed.cost.kv_token_s / profile.cost.kv_token_s
            assert ratio == pytest.approx(0.7) or ratio == pytest.approx(1.3)
        believed_costs.add(believed.cost)
    assert len(believed_costs) > 6
    exact = misjudged(profile, 0.0, 0)
    assert exact.cost.step_s == pytest.approx(profile.cost.step_s)
    assert replace(exact, cost=profile.cost, draft=profile.draft) == profile


def test_belief_error_of_1_is_rejected() -> None:
    """The model rejects an error of 1, which would allow costs of zero."""
    with pytest.raises(ValueError, match="belief error"):
        misjudged(load_profile("h100-8b"), 1.0, 0)
