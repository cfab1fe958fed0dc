"""Repetition: what a look-up in a prompt would have drafted right, told cheaply."""

from __future__ import annotations

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from draftgate.policies.speculation.repetition import (
    LEAST_LOOKUPS,
    MATCH_TOKENS,
    TAIL_TOKENS,
    repetition,
)


def by_hand(token_ids: list[int]) -> float | None:
    """The definition: look each pair up where it last stood before, and see what followed."""
    tail, latest, outcomes = token_ids[-TAIL_TOKENS:], {}, []
    for end in range(MATCH_TOKENS, len(tail)):
        key = tuple(tail[end - MATCH_TOKENS : end])
        if key in latest:
            outcomes.append(tail[latest[key]] == tail[end])
        latest[key] = end
    return sum(outcomes) / len(outcomes) if len(outcomes) >= LEAST_LOOKUPS else None


@given(st.lists(st.integers(0, 5), max_size=700))
def test_it_is_the_share_of_look_ups_that_were_right(token_ids) -> None:
    """The array form finds what a look-up token by token finds."""
    assert repetition(token_ids) == by_hand(token_ids)


def test_its_ends_are_0_and_1() -> None:
    """A text that only repeats itself is drafted right throughout; new text is not told of."""
    assert repetition([1, 2, 3, 4, 5] * 50) == 1.0
    assert repetition(range(1000)) is None
    pairs = [token for n in range(100) for token in (7, 8, 1000 + n)]  # what follows is always new
    assert repetition(pairs) == 0.0


def test_only_the_tail_of_a_long_prompt_is_looked_at() -> None:
    """What 100,000 tokens say before the tail changes nothing, and costs nothing."""
    random = Random(0)
    tail = [random.randrange(9) for _ in range(TAIL_TOKENS)]

    class Prompt(list):
        def __getitem__(self, where):
            assert where == slice(-TAIL_TOKENS, None), "more than the tail was read"
            return super().__getitem__(where)

    assert repetition(Prompt(range(100_000)) + tail) == repetition(tail)
    assert repetition(Prompt([*range(100_000), *tail])) == repetition(tail)


def test_ids_of_large_vocabularies_are_told_apart() -> None:
    """Ids up to 31 bits do not collide in a key."""
    big = (1 << 31) - 1
    assert repetition([big, 0, big, 1] * 30) == by_hand([big, 0, big, 1] * 30) == 1.0
