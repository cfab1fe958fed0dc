"""The cost of a step."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from draftgate.policies.costs.step_cost import StepCost, StepSize
from tests.policies.costs import costs

small = st.integers(0, 800)


@given(costs(), small, small, small, small, small, small)
def test_cost_is_monotone(cost, tokens, kv, sequences, a, b, c) -> None:
    """The cost rises with tokens, KV tokens and sequences, also beyond the table.

    A draft reads as many KV tokens as a sequence does on average.
    """
    here = cost.seconds(tokens, kv, sequences)
    assert cost.seconds(tokens + a, kv + b, sequences + c) >= here - 1e-12


def test_tokens_of_a_bucket_are_free_and_the_last_slope_continues() -> None:
    """Tokens within a bucket are free, and every token beyond the last bucket costs time."""
    cost = StepCost((4, 8), (1.0, 1.4))
    assert [cost.seconds(n) for n in (0, 1, 4, 5, 8)] == [1.0, 1.0, 1.0, 1.4, 1.4]
    assert cost.seconds(10) == pytest.approx(1.6)
    assert StepCost((4,), (2.0,)).seconds(6) == pytest.approx(3.0)


@given(costs(), small, small, small, st.integers(0, 300))
def test_size_of_a_step_with_drafts_takes_the_seconds_of_its_slots(
    cost, tokens, kv, sequences, slots
) -> None:
    """A size whose sequences and slots are all sampled takes the same time as `seconds`."""
    pairs = slots * kv / sequences if sequences else 0.0
    size = StepSize(tokens + slots, kv, sequences, pairs, sequences + slots)
    assert cost.size_s(size) == pytest.approx(cost.seconds(tokens + slots, kv, sequences, slots))


def test_prompt_tokens_take_no_time_for_logits() -> None:
    """A chunk of a prompt without a sampled token takes the time of its tokens alone."""
    cost = StepCost((512,), (1.0,), sample_s=0.5)
    assert cost.size_s(StepSize(512, 0, 1, 0, 0)) == 1.0
    assert cost.size_s(StepSize(512, 0, 1, 0, 1)) == 1.5


@given(costs(), small, small, small, st.integers(0, 300))
def test_vector_of_slot_times_equals_single_slot_times(cost, tokens, kv, sequences, most) -> None:
    """Each entry of the vector equals `seconds` for its number of slots."""
    expected = [cost.seconds(tokens + n, kv, sequences, n) for n in range(most + 1)]
    assert cost.slots_s(tokens, kv, sequences, most) == pytest.approx(expected)
    assert cost.few_slots_s(tokens, kv, sequences, most) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("tokens", "edge"), [(0, 16), (1, 16), (4, 16), (5, 16), (8, 16), (9, 32), (16, 32), (20, 48)]
)
def test_next_edge_skips_stairs_of_equal_cost(tokens: int, edge: int) -> None:
    """The edge skips stairs of equal cost and adds the last width beyond the table."""
    assert StepCost((4, 8, 16, 32), (1.0, 1.0, 2.0, 3.0)).next_edge(tokens) == edge


@given(costs(), small)
def test_edges_are_the_ends_of_stairs(cost, tokens) -> None:
    """Edges ascend through the table and continue with the width of the last stair."""
    edges = cost.edges_up_to(tokens)
    last, width = cost.token_buckets[-1], cost.token_buckets[-1] - sum(cost.token_buckets[-2:-1])
    assert edges == sorted(set(edges))
    assert all(edge <= tokens for edge in edges)
    assert [e for e in edges if e <= last] == [b for b in cost.token_buckets if b <= tokens]
    assert tokens < last or edges[-1] > tokens - width


@given(costs(), small)
def test_next_edge_always_advances(cost, tokens) -> None:
    """The next edge costs at most one more stair."""
    edge = cost.next_edge(tokens)
    assert edge > tokens
    if edge in cost.token_buckets:
        heights = sorted({cost.seconds(bucket) for bucket in cost.token_buckets})
        here = heights.index(cost.seconds(tokens))
        assert heights.index(cost.seconds(edge)) == here + 1
        assert cost.seconds(edge + 1) > cost.seconds(edge) or edge == cost.token_buckets[-1]


def test_attention_makes_slots_of_long_contexts_cost_more() -> None:
    """A slot costs the mean number of KV tokens that its token reads."""
    cost = StepCost((4, 8), (1.0, 1.4), pair_s=1e-3)
    assert cost.seconds(8, 1000, 2, slots=3) == pytest.approx(1.4 + 3 * 500 * 1e-3)
    assert cost.seconds(8, 0, 0, slots=3) == pytest.approx(1.4)


@pytest.mark.parametrize(
    ("buckets", "steps", "words"),
    [
        ((), (), "at least 1"),
        ((1, 2), (1.0,), "equal length"),
        ((2, 1), (1.0, 2.0), "ascend"),
        ((1, 1), (1.0, 2.0), "ascend"),
        ((0, 1), (1.0, 2.0), "ascend from 1"),
        ((1, 2), (2.0, 1.0), "must not fall"),
        ((1,), (-1.0,), "non-negative"),
    ],
)
def test_invalid_table_is_refused(buckets, steps, words) -> None:
    """The error names the broken rule."""
    with pytest.raises(ValueError, match=words):
        StepCost(buckets, steps)
