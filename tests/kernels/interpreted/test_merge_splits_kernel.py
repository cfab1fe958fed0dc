"""The merge of splits in the interpreter."""

from __future__ import annotations

import pytest
import torch

from draftgate.backends.engine.kernels import merge_splits_ref
from draftgate.backends.engine.kernels.merge_splits import merge_splits

# Triton 3.6 interprets loop bounds in a way that NumPy 2.3 deprecates (and 2.4 refuses).
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0")

_POSITIONS = torch.tensor([63, 64, 65, 200, 300, 302, 201, 0])


@pytest.mark.parametrize("window", [None, 1, 70])
@pytest.mark.parametrize("positions", [None, _POSITIONS, _POSITIONS.int()])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_merge_equals_the_reference(
    dtype: torch.dtype, positions: torch.Tensor | None, window: int | None
) -> None:
    """The merge reads only the splits of each row, although other splits contain NaN."""
    generator = torch.Generator().manual_seed(1)
    cu_query_lens = torch.tensor([0, 3, 3, 7, 8], dtype=torch.int32)
    context_lens = torch.tensor([66, 9, 304, 1], dtype=torch.int32)
    weighted = torch.randn((8, 2, 6, 20), generator=generator)
    stats = torch.randn((8, 2, 6, 2), generator=generator) * 20
    stats[..., 1] = stats[..., 1].abs() + 1
    for token, position in enumerate(_POSITIONS.tolist() if positions is not None else []):
        weighted[token, :, position // 64 + 1 :] = torch.nan
        stats[token, :, position // 64 + 1 :] = torch.nan
        oldest = 0 if window is None else max(0, position - window + 1)
        weighted[token, :, : oldest // 64] = torch.nan
        stats[token, :, : oldest // 64] = torch.nan
    tensors = (weighted, stats, cu_query_lens, context_lens, positions)
    out, expected = torch.zeros((2, 8, 2, 20), dtype=dtype)
    merge_splits(out, *tensors, window=window, split_size=64)
    merge_splits_ref.merge_splits(expected, *tensors, window=window, split_size=64)
    assert expected.isfinite().all()
    tolerance = 1e-5 if dtype is torch.float32 else 1e-2
    torch.testing.assert_close(out, expected, rtol=tolerance, atol=1e-6)
