"""Embeddings: the last token's hidden state behind the final norm, out of a step.

That is how embedding models made from decoders pool, for the last token alone has seen all others
(Qwen3-Embedding, arXiv 2506.05176; vLLM's `LAST`). Whoever asked normalises it.
"""

from __future__ import annotations

from itertools import accumulate

from torch import Tensor

from draftgate.backends.core.steps import StepPlan


def rows_of(plan: StepPlan) -> list[int]:
    """Return the rows of a step that are pooled."""
    if not plan.pooled:
        return []
    ends = list(accumulate(work.num_tokens for work in plan.work))
    return [ends[place] - 1 for place in plan.pooled]


def wanted(hidden: Tensor, num_samples: int, num_pooled: int) -> Tensor | None:
    """Return the rows that are pooled; they stand behind those that are sampled.

    Args:
        hidden: [rows, hidden_size], of `Decoder.last_hidden`.

    Returns:
        float32 [num_pooled, hidden_size], on the same device; None if there are none.
    """
    return hidden[num_samples : num_samples + num_pooled].float() if num_pooled else None


def read(pooled: Tensor | None) -> list[bytes] | None:
    """Return each row, in main memory, as float32 in little-endian order; None for none."""
    return None if pooled is None else [row.tobytes() for row in pooled.numpy().astype("<f4")]
