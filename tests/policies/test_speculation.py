"""Speculation policies: their names, the contracts they keep and the lengths of drafts."""

from __future__ import annotations

from dataclasses import replace

import hypothesis.strategies as st
import pytest
from hypothesis import given

from draftgate.policies.costs.step_cost import StepCost
from draftgate.policies.protocols import SpeculationPolicy
from draftgate.policies.registry import speculation_policy
from draftgate.policies.speculation.auto import Auto
from draftgate.policies.speculation.baselines import Fixed, Off
from draftgate.policies.testing import check_speculation
from draftgate.policies.types import (
    DraftCandidate,
    RequestView,
    StepView,
)
from tests.policies.test_speculation_plans import load

H100_8B = StepCost(
    (1, 2, 4, *range(8, 1025, 8)),
    tuple(5.886e-3 + 21.0e-6 * n for n in (1, 2, 4, *range(8, 1025, 8))),
    kv_token_s=39.3e-9,
)
"""The scale of design section 5: Llama-8B in bf16 on an H100, published fit."""


def chain(length: int, acceptance: float) -> tuple[float, ...]:
    """Return the survivals of a chain whose tokens all have this acceptance probability."""
    return tuple(acceptance**depth for depth in range(1, length + 1))


def batch(sequences: int, acceptance: float, context: int = 500, budget: int = 4096) -> StepView:
    candidates = (DraftCandidate(chain(16, acceptance)),) * sequences
    return StepView(sequences, sequences * context, sequences, budget, candidates)


def tokens_per_s(step: StepView, lengths, cost: StepCost) -> float:
    chosen = list(zip(step.candidates, lengths, strict=True))
    accepted = sum(sum(c.survivals[:n]) for c, n in chosen)
    slots = sum(lengths)
    seconds = cost.seconds(step.tokens + slots, step.kv_tokens, step.sequences, slots)
    costs = {c.depth_s for c, _ in chosen}
    seconds += sum(s * max(n for c, n in chosen if c.depth_s == s) for s in costs)
    return (step.sequences + accepted) / seconds


@pytest.mark.parametrize(
    "spec",
    [
        "off",
        "fixed:1",
        "fixed:4",
        "fixed:64",
        "auto",
        "auto:unweighted",
        "smartspec",
        "adaptive_verification",
    ],
)
def test_shipped_policy_keeps_its_contract(spec: str) -> None:
    """Every shipped policy keeps the contract of `SpeculationPolicy`."""
    policy = speculation_policy(spec)
    assert isinstance(policy, SpeculationPolicy)
    assert policy.name == spec
    check_speculation(policy)


def test_conformance_check_refuses_a_policy_beyond_its_budget() -> None:
    """The public conformance check rejects a policy that exceeds its budget."""

    class Greedy(Off):
        def draft_lengths(self, step, cost):
            return [c.max_draft_tokens for c in step.candidates]

    with pytest.raises(AssertionError, match="exceed the slot budget"):
        check_speculation(Greedy())


@pytest.mark.parametrize("acceptance", [0.4, 0.7, 0.9])
def test_auto_shortens_as_the_batch_grows(acceptance: float) -> None:
    """A larger batch never drafts longer at equal acceptance, and a very large batch
    drafts less."""
    longest = [
        max(Auto().draft_lengths(batch(size, acceptance), H100_8B)) for size in (8, 64, 256, 512)
    ]
    assert longest == sorted(longest, reverse=True)
    assert longest[-1] < longest[0]


@pytest.mark.parametrize("size", [1, 32, 256])
def test_auto_shortens_as_acceptance_falls(size: int) -> None:
    """Drafts with a lower acceptance are never longer in the same batch."""
    longest = [
        max(Auto().draft_lengths(batch(size, acceptance), H100_8B))
        for acceptance in (0.95, 0.8, 0.6, 0.3, 0.05)
    ]
    assert longest == sorted(longest, reverse=True)
    assert longest[-1] < longest[0]


def test_auto_drafts_nothing_without_a_gain() -> None:
    """`auto` drafts nothing if tokens cost their full share of the step or are never accepted."""
    linear = StepCost(tuple(range(1, 200)), tuple(1e-3 * n for n in range(1, 200)))
    assert set(Auto().draft_lengths(batch(8, 0.9), linear)) == {0}
    assert set(Auto().draft_lengths(batch(8, 0.0), H100_8B)) == {0}


def test_auto_uses_all_free_slots() -> None:
    """`auto` takes every slot that may survive before the end of a flat stair."""
    flat = StepCost((64,), (1e-3,))
    assert Auto().draft_lengths(batch(2, 0.5), flat) == [16, 16]


def test_auto_drafts_longer_if_kv_reads_dominate() -> None:
    """Drafts stay worthwhile with contexts of 32k tokens because steps are already long."""
    short = max(Auto().draft_lengths(batch(256, 0.7, context=200), H100_8B))
    long = max(Auto().draft_lengths(batch(256, 0.7, context=32_000), H100_8B))
    assert long > short


@given(
    st.lists(
        st.tuples(st.integers(0, 16), st.floats(0, 1), st.sampled_from([0.0, 1e-4, 3e-3])),
        min_size=1,
        max_size=40,
    ),
    st.integers(0, 300),
    st.integers(0, 100_000),
    st.lists(st.floats(0, 1e-2), min_size=4, max_size=4),
    st.floats(1e-6, 1e-2),
)
def test_auto_never_expects_less_than_no_speculation(
    candidates, budget, kv_tokens, rises, first_s
) -> None:
    """`auto` is at least as fast as `off` by its own cost model."""
    steps = [first_s]
    for rise in rises:
        steps.append(steps[-1] + rise)
    cost = StepCost((1, 8, 32, 64, 256), tuple(steps), 1e-8, 1e-6)
    many = len(candidates)
    offered = [DraftCandidate(chain(n, chance), depth_s) for n, chance, depth_s in candidates]
    step = StepView(many, kv_tokens, many, budget, tuple(offered))
    lengths = Auto().draft_lengths(step, cost)
    assert tokens_per_s(step, lengths, cost) >= tokens_per_s(step, [0] * many, cost)


@pytest.mark.parametrize("size", [1, 16, 128, 512])
@pytest.mark.parametrize("acceptance", [0.3, 0.7, 0.95])
def test_auto_is_no_slower_than_any_baseline_in_its_forecast(size, acceptance) -> None:
    """No baseline has a higher forecast than `auto` with equal estimates."""
    step = replace(batch(size, acceptance), acceptance=acceptance)
    best = tokens_per_s(step, Auto().draft_lengths(step, H100_8B), H100_8B)
    for spec in ("off", "fixed:2", "fixed:8", "smartspec", "adaptive_verification"):
        lengths = speculation_policy(spec).draft_lengths(step, H100_8B)
        assert best >= tokens_per_s(step, lengths, H100_8B) * (1 - 1e-9)


def test_threshold_by_batch_follows_its_table(tmp_path) -> None:
    """The policy drafts nothing for batch sizes without a row."""
    table = tmp_path / "table.json"
    table.write_text("[[1, 4, 8], [5, 64, 2]]")
    policy = speculation_policy(f"threshold_by_batch:{table}")
    check_speculation(policy)
    assert policy.name == f"threshold_by_batch:{table.name}"
    assert policy.decide(RequestView(1, 9, 0.0), load()).max_draft_tokens == 8
    lengths = [set(policy.draft_lengths(batch(n, 0.1), H100_8B)) for n in (4, 5, 64, 65)]
    assert lengths == [{8}, {2}, {2}, {0}]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "cannot read"),
        ("[[1, 2", "is not JSON"),
        ("{}", "rows of three whole numbers"),
        ("[[1, 2]]", "rows of three whole numbers"),
        ("[[1, 2, true]]", "rows of three whole numbers"),
        ("[]", "is empty"),
        ("[[4, 2, 1]]", "is not a row"),
        ("[[1, 2, 65]]", "is not a row"),
    ],
)
def test_invalid_table_is_refused(tmp_path, content, words) -> None:
    """The error names the file and the problem."""
    table = tmp_path / "table.json"
    if content is not None:
        table.write_text(content)
    with pytest.raises(ValueError, match=words) as refused:
        speculation_policy(f"threshold_by_batch:{table}")
    assert str(table) in str(refused.value)


def test_fixed_drafts_the_same_whatever_the_load() -> None:
    """`fixed:K` takes K slots per candidate, in order, until the budget is used."""
    assert Fixed(3).draft_lengths(batch(4, 0.01, budget=8), H100_8B) == [3, 3, 2, 0]
    assert Fixed(3).decide(RequestView(1, 9, 0.0), load(price=50.0)).max_draft_tokens == 3


@pytest.mark.parametrize("spec", ["", "of", "fixed4", "AUTO"])
def test_unknown_policy_error_lists_the_known_policies(spec: str) -> None:
    """The error lists every known policy once."""
    with pytest.raises(ValueError, match="unknown speculation policy") as unknown:
        speculation_policy(spec)
    assert repr(spec) in str(unknown.value)
    names = str(unknown.value).partition("known: ")[2].split(", ")
    assert {"off", "fixed:K", "auto[:unweighted]", "smartspec", "threshold_by_batch:FILE"} <= set(
        names
    )
    assert "fixed" not in names
    assert len(names) == len(set(names))


@pytest.mark.parametrize("spec", ["fixed", "fixed:", "fixed:x", "fixed:-1", "fixed:0", "fixed:²"])
def test_fixed_needs_a_whole_number(spec: str) -> None:
    """`fixed` without a positive integer raises an error that explains the argument."""
    with pytest.raises(ValueError, match="fixed:K needs"):
        speculation_policy(spec)


@pytest.mark.parametrize("spec", ["off:1", "auto:x", "smartspec:4"])
def test_unexpected_argument_is_refused(spec: str) -> None:
    """A policy without parameters rejects an argument."""
    with pytest.raises(ValueError, match="takes no argument"):
        speculation_policy(spec)


def test_unweighted_gives_slots_to_the_likeliest() -> None:
    """`auto:unweighted` acts like `auto` with equal weights."""
    likely, late = chain(8, 0.8), chain(8, 0.6)
    alike = StepView(2, 1000, 2, 4, (DraftCandidate(likely), DraftCandidate(late)))
    candidates = (DraftCandidate(likely), DraftCandidate(late, weight=4.0))
    weighted = replace(alike, candidates=candidates, weight=5.0)
    plain, unweighted = Auto(), speculation_policy("auto:unweighted")
    expected = plain.draft_lengths(alike, H100_8B)
    assert unweighted.draft_lengths(weighted, H100_8B) == expected
    assert plain.draft_lengths(weighted, H100_8B) != expected
    least = plain.least_survival(alike, H100_8B)
    assert unweighted.least_survival(weighted, H100_8B) == least


def test_auto_drafts_as_deep_as_drafting_gains() -> None:
    """`auto` skips a depth that costs more than its gain and drafts a free depth."""
    step_s = H100_8B.seconds(1, 500, 1)
    lengths = []
    for depth_s in (0.0, step_s / 20, step_s / 4, 2 * step_s):
        step = StepView(1, 500, 1, 64, (DraftCandidate(chain(16, 0.8), depth_s),))
        lengths += Auto().draft_lengths(step, H100_8B)
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] > 12
    assert 0 < lengths[2] < lengths[1] < lengths[0]
    assert lengths[3] == 0
