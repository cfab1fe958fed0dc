"""Repetition: the share of correct n-gram lookups in a prompt."""

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


def repetition_by_definition(token_ids: list[int]) -> float | None:
    """Return the share of correct lookups by comparing each pair with its latest earlier place."""
    tail, latest, outcomes = token_ids[-TAIL_TOKENS:], {}, []
    for end in range(MATCH_TOKENS, len(tail)):
        key = tuple(tail[end - MATCH_TOKENS : end])
        if key in latest:
            outcomes.append(tail[latest[key]] == tail[end])
        latest[key] = end
    return sum(outcomes) / len(outcomes) if len(outcomes) >= LEAST_LOOKUPS else None


@given(st.lists(st.integers(0, 5), max_size=700))
def test_repetition_is_the_share_of_correct_lookups(token_ids) -> None:
    """The vectorized form equals a token-by-token computation."""
    assert repetition(token_ids) == repetition_by_definition(token_ids)


def test_repetitive_text_has_repetition_1_and_new_text_none() -> None:
    """The repetition of new text is unknown because it has too few lookups."""
    assert repetition([1, 2, 3, 4, 5] * 50) == 1.0
    assert repetition(range(1000)) is None
    pairs = [token for n in range(100) for token in (7, 8, 1000 + n)]  # new tokens follow each pair
    assert repetition(pairs) == 0.0


def test_only_the_tail_of_a_long_prompt_counts() -> None:
    """A prefix of 100,000 tokens does not change the result."""
    random = Random(0)
    tail = [random.randrange(9) for _ in range(TAIL_TOKENS)]

    class Prompt(list):
        def __getitem__(self, where):
            assert where == slice(-TAIL_TOKENS, None), "more than the tail was read"
            return super().__getitem__(where)

    assert repetition(Prompt(range(100_000)) + tail) == repetition(tail)
    assert repetition(Prompt([*range(100_000), *tail])) == repetition(tail)


def test_large_token_ids_do_not_collide() -> None:
    """The keys distinguish token ids of up to 31 bits."""
    big = (1 << 31) - 1
    assert (
        repetition([big, 0, big, 1] * 30) == repetition_by_definition([big, 0, big, 1] * 30) == 1.0
    )
