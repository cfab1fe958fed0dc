"""The bits of a decoder row do not depend on the other rows of the step."""

from __future__ import annotations

import pytest
import torch

from draftgate.backends.core.steps import StepPlan
from draftgate.backends.engine.runner import Runner
from tests.engine.step_logits import Table, blocks_of, logits_in_steps, shipped_runner, work


@pytest.fixture(scope="module")
def runner() -> Runner:
    return shipped_runner()


@pytest.fixture(scope="module")
def tokens() -> list[int]:
    return torch.randint(0, 4096, (600,), generator=torch.Generator().manual_seed(2)).tolist()


@pytest.fixture(scope="module")
def one_by_one(runner: Runner, tokens: list[int]) -> torch.Tensor:
    return logits_in_steps(runner, blocks_of(0, 600), tokens, list(range(601)))


@pytest.mark.parametrize("rows", [1, 5, 16, 33, 40, 160, 512])
def test_row_has_the_same_bits_in_steps_of_any_size(
    rows: int, runner: Runner, tokens: list[int], one_by_one: torch.Tensor
) -> None:
    """The logits of a token have the same bits alone and in a step of any size."""
    edges = [*range(0, 600, rows), 600]
    logits = logits_in_steps(runner, blocks_of(1, 600), tokens, edges)
    assert torch.equal(logits, one_by_one)


def test_row_has_the_same_bits_in_a_mixed_batch(
    runner: Runner, tokens: list[int], one_by_one: torch.Tensor
) -> None:
    """The rows of decodes, verify steps and prefill chunks have the same bits together and
    alone."""
    sizes = [1, 3, 17, 64, 100]
    places = [0] * len(sizes)
    while any(place < 600 for place in places):
        parts = [
            work(blocks_of(i + 1, 600), tokens, place, min(place + size, 600))
            for i, (place, size) in enumerate(zip(places, sizes, strict=True))
            if place < 600
        ]
        logits = runner.logits(StepPlan(tuple(parts)))
        expected = [one_by_one[part.start : part.context_tokens] for part in parts]
        assert torch.equal(logits, torch.cat(expected))
        places = [min(place + size, 600) for place, size in zip(places, sizes, strict=True)]


def test_scattered_blocks_give_the_same_bits(
    runner: Runner, tokens: list[int], one_by_one: torch.Tensor
) -> None:
    """Logits have the same bits for keys and values in scattered blocks and in contiguous
    memory."""
    table = Table([(7 * i) % 251 for i in range(38)])
    logits = logits_in_steps(runner, table, tokens, [*range(0, 600, 7), 600])
    assert torch.equal(logits, one_by_one)
