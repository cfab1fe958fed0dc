"""Walks, budgets and look-ups of a step in the interpreter."""

from __future__ import annotations

import pytest
import torch

from draftgate.backends.engine.kernels import (
    accept_walk,
    accept_walk_ref,
    ngram_scan,
    ngram_scan_ref,
    trim_drafts,
    trim_drafts_ref,
)
from tests.kernels.step_cases import budgets, history_case, trim_case, walk_case


@pytest.mark.parametrize(
    ("branching", "eos", "budget"),
    [(0.0, (), 1000), (0.3, (3, 12, 23, 30, 40), 1000), (0.8, (), 6)],
)
def test_walks_equal_the_reference(branching: float, eos: tuple[int, ...], budget: int) -> None:
    """Chains and trees emit, stop and are recorded as in the reference, whatever their size."""
    case = walk_case(11, branching=branching, eos=eos, budget=budget)
    expected, own = case.to("cpu"), case.to("cpu")
    wanted = accept_walk_ref.accept_walk(
        *expected.arguments(), max_rows=case.max_rows, history=expected.history
    )
    walked = accept_walk.accept_walk(*own.arguments(), max_rows=case.max_rows, history=own.history)
    assert own.outcome(walked) == expected.outcome(wanted)


def test_walk_without_history() -> None:
    """Without a history the walk emits the same and writes to none."""
    case = walk_case(12, branching=0.3, eos=(3,))
    expected, own = case.to("cpu"), case.to("cpu")
    wanted = accept_walk_ref.accept_walk(*expected.arguments(), max_rows=case.max_rows)
    walked = accept_walk.accept_walk(*own.arguments(), max_rows=case.max_rows)
    assert own.outcome(walked) == expected.outcome(wanted)


@pytest.mark.parametrize("levels", [0, 1, 4])
@pytest.mark.parametrize(("sequences", "max_slots"), [(1, 1), (7, 5), (33, 8), (3, 64)])
def test_trimmed_drafts_equal_the_reference(sequences: int, max_slots: int, levels: int) -> None:
    """Every budget keeps the reference's slots, with ties, idle sequences and missing slots."""
    case = trim_case(sequences, max_slots, seed=sequences, levels=levels)
    for budget in budgets(case):
        arguments = case.arguments(budget)
        expected = trim_drafts_ref.trim_drafts(*arguments)
        trimmed = trim_drafts.trim_drafts(*arguments)
        assert trimmed.kept.tolist() == expected.kept.tolist()
        assert trimmed.cu_rows.tolist() == expected.cu_rows.tolist()


def test_the_largest_batch_is_trimmed() -> None:
    """512 sequences of 64 slots, read from a wider table, keep the reference's slots."""
    case = trim_case(512, 64, seed=1, levels=30)
    survivals, valid, active, budget = case.arguments(case.slots() // 3)
    wide = torch.full((512, 70), 9.0)
    wide[:, :64] = survivals
    expected = trim_drafts_ref.trim_drafts(survivals, valid, active, budget)
    trimmed = trim_drafts.trim_drafts(wide[:, :64], valid, active, budget)
    assert trimmed.kept.tolist() == expected.kept.tolist()
    assert trimmed.cu_rows.tolist() == expected.cu_rows.tolist()


def test_too_many_slots_are_refused() -> None:
    """What does not fit one program is an error."""
    arguments = trim_case(513, 64, seed=0).arguments(5)
    with pytest.raises(ValueError, match="do not fit"):
        trim_drafts.trim_drafts(*arguments)


@pytest.mark.parametrize(("alphabet", "noise"), [(2, 0.5), (4, 0.05), (3000, 0.1)])
@pytest.mark.parametrize(("min_n", "max_n", "num_drafts"), [(1, 8, 5), (3, 4, 16), (2, 2, 1)])
def test_looked_up_drafts_equal_the_reference(
    alphabet: int, noise: float, min_n: int, max_n: int, num_drafts: int
) -> None:
    """Texts of any length get the reference's drafts, also over tiles, and padding gets none."""
    case = history_case([600, 0, 1, 2, 3, 9, 256, 257, 258, 511], 600, alphabet, 7, noise)
    sizes = {"num_drafts": num_drafts, "min_n": min_n, "max_n": max_n}
    expected = ngram_scan_ref.ngram_scan(*case.arguments(), **sizes)
    found = ngram_scan.ngram_scan(*case.arguments(), **sizes)
    for tensor, wanted in zip(found, expected, strict=True):
        assert tensor.tolist() == wanted.tolist()


def test_a_bound_on_lengths_does_not_change_drafts() -> None:
    """Looking up in the beginning of a wider history gives the same drafts."""
    case = history_case([300, 120, 7], 900, 4, 3)
    history, rows, lengths = case.arguments()
    sizes = {"num_drafts": 6, "min_n": 1, "max_n": 5}
    expected = ngram_scan_ref.ngram_scan(history, rows, lengths, **sizes)
    found = ngram_scan.ngram_scan(history[:, :300], rows, lengths, **sizes)
    for tensor, wanted in zip(found, expected, strict=True):
        assert tensor.tolist() == wanted.tolist()
