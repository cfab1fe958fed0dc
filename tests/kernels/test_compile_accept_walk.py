"""The accept walk, compiled for a Hopper GPU without a GPU."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from draftgate.backends.engine.kernels.accept_walk import accept_walk
from draftgate.backends.engine.kernels.accept_walk_ref import StopRules
from tests.kernels.compiling import assert_lean, launches_of, meta_tensor

_SEQUENCES = 256


def _index(*shape: int) -> torch.Tensor:
    return meta_tensor(*shape, dtype=torch.int32)


def _tokens(*shape: int) -> torch.Tensor:
    return meta_tensor(*shape, dtype=torch.int64)


@pytest.mark.parametrize("flags", [torch.int8, torch.bool])
@pytest.mark.parametrize("num_eos", [0, 3])
@pytest.mark.parametrize("max_rows", [5, 65])
def test_accept_walk_does_not_spill(max_rows: int, num_eos: int, flags: torch.dtype) -> None:
    """A multiprocessor runs its maximum of 32 walks with 4 and with 64 drafts."""
    rows = _SEQUENCES * max_rows
    stop = StopRules(_index(_SEQUENCES), _tokens(num_eos), meta_tensor(_SEQUENCES, dtype=flags))
    launches = launches_of(
        lambda: accept_walk(
            _tokens(rows),
            _tokens(rows),
            _index(rows),
            _index(_SEQUENCES + 1),
            stop,
            max_rows=max_rows,
        )
    )
    assert_lean(launches, programs=32)
