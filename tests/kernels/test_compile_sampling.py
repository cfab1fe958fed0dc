"""Noise and sampling, compiled for a Hopper GPU without a GPU."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget

from draftgate.backends.engine.kernels.sample_verify import sample
from draftgate.backends.engine.kernels.sample_verify_ref import RowSampling
from draftgate.backends.engine.kernels.token_mask import forbid_tokens
from tests.kernels import noise_kernel
from tests.kernels.compiling import BLACKWELL, HOPPER, assert_lean, launches_of, meta_tensor

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


@pytest.mark.parametrize("target", [HOPPER, BLACKWELL], ids=["sm_90", "sm_100"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sampling_does_not_spill(dtype: torch.dtype, target: GPUTarget) -> None:
    """None of the three kernels spills, and a multiprocessor runs two programs of all kernels but
    the cut-off, whose programs have 16 warps."""
    logits = meta_tensor(_ROWS, 151936, dtype=dtype)
    cutoff, *others = launches_of(lambda: sample(logits, _row_sampling()), target)
    assert_lean([cutoff])
    assert_lean(others, programs=2)
    assert [launch.name for launch in (cutoff, *others)] == [
        "_cutoff_kernel",
        "_tile_winner_kernel",
        "_row_winner_kernel",
    ]
    assert "lg2.approx" not in others[0].ptx


def test_searches_read_a_row_without_exchanges_between_threads() -> None:
    """Top-k and top-p add the weights above four pivots in a loop without barriers or shuffles."""
    cutoff, *_ = launches_of(lambda: sample(meta_tensor(_ROWS, 128256), _row_sampling()))
    inner = [loop for loop in _loops(cutoff.ptx) if "bar.sync" not in loop and "shfl" not in loop]
    # Each of the 512 threads has 4 logits of a tile.
    assert sum(loop.count("add.s64") == 4 * 4 for loop in inner) == 2


def _loops(ptx: str) -> list[str]:
    """Return the instructions between each label and each branch back to the label."""
    lines = [line.strip() for line in ptx.splitlines()]
    places = {line.partition(":")[0]: place for place, line in enumerate(lines) if ":" in line}
    loops = []
    for place, line in enumerate(lines):
        _, is_branch, label = line.rstrip(";").rpartition("bra ")
        if is_branch and places[label.strip()] < place:
            loops.append("\n".join(lines[places[label.strip()] : place]))
    return loops


@pytest.mark.parametrize("vocab", _VOCABS)
def test_token_masks_do_not_spill(vocab: int) -> None:
    """A multiprocessor runs 16 programs of the token masks."""
    logits, rows = meta_tensor(_ROWS, vocab), meta_tensor(64, dtype=torch.int64)
    masks = meta_tensor(64, -(-vocab // 32), dtype=torch.int32)
    assert_lean(launches_of(lambda: forbid_tokens(logits, rows, masks)), programs=16)
