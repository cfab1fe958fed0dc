"""The input of the next pass of a draft model, compiled without a GPU."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget

from draftgate.backends.engine.kernels.advance_drafts import advance_drafts
from draftgate.backends.engine.kernels.advance_drafts_ref import DraftRows
from draftgate.backends.engine.kernels.paged_attention_ref import BlockTables
from tests.kernels.compiling import (
    BLACKWELL,
    HOPPER,
    assert_lean,
    launches_of,
    meta_tensor,
    variants_of,
)


def _advance(sequences: int) -> None:
    def index(*shape: int) -> torch.Tensor:
        return meta_tensor(*shape, dtype=torch.int32)

    def tokens(*shape: int) -> torch.Tensor:
        return meta_tensor(*shape, dtype=torch.int64)

    rows = DraftRows(*(tokens(sequences) for _ in range(3)), *(index(sequences) for _ in range(5)))
    tables = BlockTables(index(8 * sequences), index(sequences), 8)
    advance_drafts(
        tokens(sequences), rows, tables, tokens(65, 256), page_tokens=16, dump_slot=99_999
    )


@pytest.mark.parametrize("target", [HOPPER, BLACKWELL])
def test_advance_does_not_spill(target: GPUTarget) -> None:
    """A multiprocessor runs many programs."""
    assert_lean(launches_of(lambda: _advance(256), target), programs=16)


def test_advance_has_one_variant_for_any_number_of_sequences() -> None:
    """The number of sequences does not select another kernel."""
    assert variants_of(_advance, (1, 2, 15, 16, 48)) == {"_advance_drafts_kernel": 1}
