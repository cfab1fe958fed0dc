"""The merge of splits in the interpreter."""

from __future__ import annotations

import pytest
import torch

from draftgate.backends.engine.kernels import merge_splits_ref
from draftgate.backends.engine.kernels.merge_splits import merge_splits

_PARTIALS = torch.tensor([[0, 1], [1, 2], [0, 0], [3, 9], [12, 8], [20, 20]], dtype=torch.int32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_merge_equals_the_reference(dtype: torch.dtype) -> None:
    """The merge reads the splits of each token, although other slots contain NaN.

    It does not write tokens without splits, and skips splits of which a row sees no key.
    """
    generator = torch.Generator().manual_seed(1)
    weighted = torch.randn((44, 2, 20), generator=generator)
    stats = torch.randn((44, 2, 2), generator=generator) * 20
    stats[..., 1] = stats[..., 1].abs() + 1
    weighted[40:], stats[40:] = torch.nan, torch.nan
    for slot, head in ((1, 0), (11, 1), (15, 0)):
        weighted[slot, head], stats[slot, head] = 0.0, torch.tensor([-torch.inf, 0.0])
    out, expected = torch.full((2, 6, 2, 20), 7.0, dtype=dtype)
    merge_splits(out, weighted, stats, _PARTIALS)
    merge_splits_ref.merge_splits(expected, weighted, stats, _PARTIALS)
    assert expected.isfinite().all()
    assert (out[2] == 7.0).all()
    tolerance = 1e-5 if dtype is torch.float32 else 1e-2
    torch.testing.assert_close(out, expected, rtol=tolerance, atol=1e-6)
