"""Random tokens in C (`drawing.c`), equal to those of the definition (`sample_verify_ref`).

A row of 49,152 tokens takes at most 0.13 ms with AVX-512 and 0.19 ms with AVX2, instead of 1.05 ms
(one thread of a busy Xeon, 2026-11-28). Without this, sampling takes a fifth of a step of
SmolLM2-135M with 16 streams.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache

import torch
from torch import Tensor

from draftgate.backends.engine.kernels import sample_verify_ref as reference
from draftgate.backends.engine.kernels.sample_verify_ref import RowSampling
from draftgate.backends.engine.operators.compiler import compiled


@lru_cache(maxsize=1)
def _library() -> ctypes.CDLL | None:
    library = compiled("drawing.c")
    if library is not None:
        library.draw.argtypes = (*[ctypes.c_void_p] * 6, *[ctypes.c_int64] * 3)
        library.draw.restype = None
    return library


def draw(logits: Tensor, rows: RowSampling) -> Tensor:
    """Return the token of every row, as `sample_verify_ref.draw` does: int64 [rows].

    Args:
        logits: float32 [rows, vocab_size], contiguous, on the CPU.
        rows: parameters per row. Every temperature must be positive.
    """
    library = _library()
    if library is None:
        return reference.draw(logits, rows)
    scores, temperature = logits, rows.temperature
    if reference.has_filter(rows, logits.shape[1]):
        scores = reference.filtered_scores(logits, rows)
        temperature = torch.ones_like(temperature)
    tokens = torch.empty(len(scores), dtype=torch.int64)
    columns = (scores, temperature, rows.seed, rows.choice, rows.position)
    contiguous = [column.contiguous() for column in columns]
    library.draw(
        tokens.data_ptr(),
        *(column.data_ptr() for column in contiguous),
        *scores.shape,
        torch.get_num_threads(),
    )
    undecided = (tokens < 0).nonzero()[:, 0]
    if len(undecided):
        tokens[undecided] = reference.draw(logits[undecided], rows.select(undecided))
    return tokens
