"""Walks, budgets and look-ups of a step against their references on a GPU, where there is one."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from draftgate.backends.engine.kernels import (
    accept_walk,
    accept_walk_ref,
    ngram_scan,
    ngram_scan_ref,
    trim_drafts,
    trim_drafts_ref,
)
from draftgate.backends.engine.kernels.accept_walk_ref import TokenHistory
from tests.kernels.step_cases import (
    WALK_ROWS,
    WalkCase,
    budgets,
    history_case,
    trim_case,
    walk_case,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET", "0") == "1",
        reason="needs a CUDA device and compiled kernels",
    ),
]

_SIZES = {"num_drafts": 7, "min_n": 1, "max_n": 8}


def _lists(tensors: Sequence[torch.Tensor]) -> list[list[int]]:
    return [tensor.tolist() for tensor in tensors]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("branching", "eos", "budget"),
    [(0.0, (), 1000), (0.3, (3, 12, 23, 30, 40), 1000), (0.8, (), 6)],
)
def test_walks_equal_the_reference(
    branching: float, eos: tuple[int, ...], budget: int, seed: int
) -> None:
    """The GPU emits, stops and records as the reference does, for chains and trees of any size."""
    case = walk_case(seed, branching=branching, eos=eos, budget=budget, rows=WALK_ROWS * 20)
    expected, own = case.to("cpu"), case.to("cuda")
    wanted = accept_walk_ref.accept_walk(
        *expected.arguments(), max_rows=case.max_rows, history=expected.history
    )
    walked = accept_walk.accept_walk(*own.arguments(), max_rows=case.max_rows, history=own.history)
    assert own.outcome(walked) == expected.outcome(wanted)


@pytest.mark.parametrize("levels", [0, 1, 4, 1000])
@pytest.mark.parametrize(
    ("sequences", "max_slots"), [(1, 1), (7, 5), (64, 8), (300, 33), (512, 64)]
)
def test_trimmed_drafts_equal_the_reference(sequences: int, max_slots: int, levels: int) -> None:
    """The GPU keeps the reference's slots under every budget, with ties and missing slots."""
    case = trim_case(sequences, max_slots, seed=sequences, levels=levels)
    for budget in budgets(case):
        expected = trim_drafts_ref.trim_drafts(*case.arguments(budget))
        trimmed = trim_drafts.trim_drafts(*case.arguments(budget, "cuda"))
        assert _lists(trimmed) == _lists(expected)


@pytest.mark.parametrize(("alphabet", "noise"), [(2, 0.5), (4, 0.05), (3000, 0.1)])
def test_looked_up_drafts_equal_the_reference(alphabet: int, noise: float) -> None:
    """The GPU looks up the reference's drafts in texts of any length, padding among them."""
    lengths = [20_000, 0, 1, 2, 3, 9, 256, 257, 258, 5000] * 4
    case = history_case(lengths, 20_000, alphabet, 5, noise)
    expected = ngram_scan_ref.ngram_scan(*case.arguments(), **_SIZES)
    found = ngram_scan.ngram_scan(*case.arguments("cuda"), **_SIZES)
    assert _lists(found) == _lists(expected)


def _decide(case: WalkCase, survivals: torch.Tensor, budget: torch.Tensor) -> list[torch.Tensor]:
    """Ends a step and begins the next one: walk, look-up behind the new tokens, trim."""
    walked = accept_walk.accept_walk(
        *case.arguments(), max_rows=case.max_rows, history=case.history
    )
    tokens, rows = case.history
    found = ngram_scan.ngram_scan(tokens, rows, case.seq_lens, **_SIZES)
    active = 1 - walked.finished
    trimmed = trim_drafts.trim_drafts(survivals, found.valid, active, budget)
    return [walked.num_emitted, walked.finished, *found, *trimmed]


def _whole_case() -> WalkCase:
    """Returns a step on the GPU without padding, whose texts have every token that may come."""
    case = walk_case(2, branching=0.3, eos=(3,), rows=(9, 1, 65, 5, 12, 3))
    tokens, rows = case.history
    texts = (torch.arange(200, dtype=torch.int32) % 50).repeat(tokens.shape[0], 1)
    history = TokenHistory(texts, rows)
    return replace(case, seq_lens=case.seq_lens + 60, history=history).to("cuda")


def _falling_survivals(sequences: int) -> torch.Tensor:
    """Returns the survivals that a table gives: the same for every sequence."""
    table = 0.8 ** torch.arange(1, _SIZES["num_drafts"] + 1)
    return table.repeat(sequences, 1).cuda()


def test_decisions_do_not_synchronise() -> None:
    """Walk, look-up and trim leave the host running ahead of the GPU."""
    case = _whole_case()
    survivals = _falling_survivals(6)
    budget = torch.tensor(11, dtype=torch.int32, device="cuda")
    # Once before, for the compilation.
    _decide(case, survivals, budget)
    torch.cuda.set_sync_debug_mode("error")
    try:
        _decide(case, survivals, budget)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_decisions_can_be_captured() -> None:
    """A graph of all three, captured once, decides on new inputs as direct calls do."""
    case = _whole_case()
    survivals = _falling_survivals(6)
    budget = torch.tensor(11, dtype=torch.int32, device="cuda")
    seq_lens, texts = case.seq_lens.clone(), case.history.tokens.clone()
    # Once before, for the compilation.
    _decide(case, survivals, budget)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = _decide(case, survivals, budget)
    other = walk_case(3, branching=0.8, eos=(3,), rows=(5, 9, 1, 12, 65, 3)).to("cuda")
    inputs = zip(case.arguments()[:4], other.arguments()[:4], strict=True)
    for tensor, changed in inputs:
        tensor.copy_(changed)
    survivals.mul_(0.5)
    budget.fill_(5)

    def restart() -> None:
        case.seq_lens.copy_(seq_lens)
        case.history.tokens.copy_(texts)

    restart()
    graph.replay()
    replayed = _lists([*captured, case.seq_lens, case.history.tokens])
    restart()
    direct = _decide(case, survivals, budget)
    assert replayed == _lists([*direct, case.seq_lens, case.history.tokens])
    assert sum(replayed[0]) > 6
    kept = replayed[-4]
    assert sum(kept) == 5
    assert max(kept) < 5
