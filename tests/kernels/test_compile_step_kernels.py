"""The kernels of a step's decisions compile for a Hopper GPU without one, and spill nothing."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from draftgate.backends.engine.kernels.accept_walk import accept_walk
from draftgate.backends.engine.kernels.accept_walk_ref import StopRules, TokenHistory
from draftgate.backends.engine.kernels.ngram_scan import ngram_scan
from draftgate.backends.engine.kernels.trim_drafts import trim_drafts
from tests.kernels.compiling import assert_lean, launches_of, on_paper

_SEQUENCES = 256


def _index(*shape: int) -> torch.Tensor:
    return on_paper(*shape, dtype=torch.int32)


def _tokens(*shape: int) -> torch.Tensor:
    return on_paper(*shape, dtype=torch.int64)


@pytest.mark.parametrize("flags", [torch.int8, torch.bool])
@pytest.mark.parametrize("num_eos", [0, 3])
@pytest.mark.parametrize("has_history", [False, True])
@pytest.mark.parametrize("max_rows", [5, 65])
def test_walks_do_not_spill(
    max_rows: int, has_history: bool, num_eos: int, flags: torch.dtype
) -> None:
    """A walk over 4 or 64 drafts is lean enough for 32 programs, as many as can be."""
    rows = _SEQUENCES * max_rows
    stop = StopRules(_index(_SEQUENCES), _tokens(num_eos), on_paper(_SEQUENCES, dtype=flags))
    history = TokenHistory(_index(512, 8192), _index(_SEQUENCES)) if has_history else None
    launches = launches_of(
        lambda: accept_walk(
            _tokens(rows),
            _tokens(rows),
            _index(rows),
            _index(_SEQUENCES + 1),
            stop,
            _index(_SEQUENCES),
            max_rows=max_rows,
            history=history,
        )
    )
    assert_lean(launches, programs=32)


@pytest.mark.parametrize("flags", [torch.int8, torch.bool])
@pytest.mark.parametrize(("sequences", "slots"), [(512, 64), (256, 16), (256, 8), (64, 8), (1, 1)])
def test_trim_does_not_spill(sequences: int, slots: int, flags: torch.dtype) -> None:
    """The one program of a trim holds the largest batch in registers, and every smaller one."""
    launches = launches_of(
        lambda: trim_drafts(
            on_paper(sequences, slots),
            _index(sequences),
            on_paper(sequences, dtype=flags),
            _index(),
        )
    )
    assert_lean(launches)


@pytest.mark.parametrize(("min_n", "max_n"), [(1, 8), (2, 2)])
@pytest.mark.parametrize("num_drafts", [1, 5, 64])
def test_look_up_does_not_spill(num_drafts: int, min_n: int, max_n: int) -> None:
    """Scan and copy are lean enough for 32 programs, for chains and n-grams of any length."""
    history = _index(512, 8192)
    launches = launches_of(
        lambda: ngram_scan(
            history,
            _index(_SEQUENCES),
            _index(_SEQUENCES),
            num_drafts=num_drafts,
            min_n=min_n,
            max_n=max_n,
        )
    )
    assert_lean(launches, programs=16)
    assert len(launches) == 2
