"""Noise and sampling, compiled for a Hopper GPU without a GPU."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from draftgate.backends.engine.kernels.sample_verify import sample
from draftgate.backends.engine.kernels.sample_verify_ref import RowSampling
from draftgate.backends.engine.kernels.token_mask import forbid_tokens
from tests.kernels import noise_kernel
from tests.kernels.compiling import assert_lean, launches_of, meta_tensor

_ROWS = 320
_VOCABS = [49152, 128256, 151936]


def _row_sampling() -> RowSampling:
    integers = [meta_tensor(_ROWS, dtype=torch.int32) for _ in range(3)]
    numbers = [meta_tensor(_ROWS) for _ in range(3)]
    seed = meta_tensor(_ROWS, dtype=torch.int64)
    return RowSampling(
        numbers[0], integers[0], numbers[1], numbers[2], seed, integers[1], integers[2]
    )


@pytest.mark.parametrize("name", ["philox_words", "uniform", "gumbel"])
def test_noise_does_not_spill(name: str) -> None:
    """Words, uniforms and Gumbel noise do not spill, and their logarithms are accurate.

    The error of lg2.approx near u = 1 would give infinities.
    """
    rows = _row_sampling()
    arguments = (rows.seed, rows.choice, rows.position, 0, 128256)
    (launch,) = launches_of(lambda: getattr(noise_kernel, name)(*arguments))
    assert_lean([launch], programs=16)
    assert "lg2.approx" not in launch.ptx


@pytest.mark.parametrize("vocab", _VOCABS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sampling_does_not_spill(dtype: torch.dtype, vocab: int) -> None:
    """None of the three kernels spills, and a multiprocessor runs two programs of each kernel."""
    logits = meta_tensor(_ROWS, vocab, dtype=dtype)
    launches = launches_of(lambda: sample(logits, _row_sampling()))
    assert_lean(launches, programs=2)
    assert [launch.name for launch in launches] == [
        "_cutoff_kernel",
        "_tile_winner_kernel",
        "_row_winner_kernel",
    ]
    assert "lg2.approx" not in launches[1].ptx


@pytest.mark.parametrize("vocab", _VOCABS)
def test_token_masks_do_not_spill(vocab: int) -> None:
    """A multiprocessor runs 16 programs of the token masks."""
    logits, rows = meta_tensor(_ROWS, vocab), meta_tensor(64, dtype=torch.int64)
    masks = meta_tensor(64, -(-vocab // 32), dtype=torch.int32)
    assert_lean(launches_of(lambda: forbid_tokens(logits, rows, masks)), programs=16)
