"""Acceptance of tree drafts in torch: from each row to the draft that equals its sample.

The rows of a sequence are the root, whose input is the last confirmed token, and a row per draft
token, depth first. The walk starts at the root. It emits the sample of a row and moves to the row
of the child draft that equals the sample. A sample without such a child is the last emitted token
(the bonus token or the correction). The walk therefore accepts a draft if and only if the draft
equals the token of its position. The text does not depend on the drafts (``sample_verify_ref``).

The walk also ends after an end-of-sequence token, which it emits, and after the last token that the
sequence may still emit.

Source: tree verification of SpecInfer (arXiv 2305.09781), with coupled samples.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Final, NamedTuple

import torch
from torch import Tensor

NO_DRAFT: Final = -1
"""Draft token of a row without a draft. This value equals no token."""

NO_ROW: Final = -1
"""Row of a token that the walk did not emit."""


class StopRules(NamedTuple):
    """Rules that end each sequence of a step.

    Attributes:
      remaining: int32 ``[sequences]``, tokens that the sequence may still emit. With 0 the walk
        emits nothing.
      eos: int64 ``[num_eos]``, tokens that end a sequence, the same for all, possibly empty.
      ignore_eos: int8 or bool ``[sequences]``, whether the sequence continues after such a token.
    """

    remaining: Tensor
    eos: Tensor
    ignore_eos: Tensor


class AcceptedWalk(NamedTuple):
    """The tokens that a step emits.

    Attributes:
      emitted: int64 ``[rows]``, emitted tokens from the first row of each sequence on, then
        ``NO_DRAFT``.
      num_emitted: int32 ``[sequences]``, accepted drafts plus the token after them. Padding has 0.
      kept_rows: int32 ``[rows]``, the row within the sequence that sampled each emitted token, then
        ``NO_ROW``. The accepted draft of depth d >= 1 is number ``kept_rows[d] - 1`` of the draft.
    """

    emitted: Tensor
    num_emitted: Tensor
    kept_rows: Tensor


def accept_walk(
    sampled: Tensor,
    draft_tokens: Tensor,
    draft_parents: Tensor,
    cu_rows: Tensor,
    stop: StopRules,
    *,
    max_rows: int,
) -> AcceptedWalk:
    """Walk the tree drafts of a ragged batch.

    Args:
      sampled: int64 ``[rows]``, the token drawn from each row's logits.
      draft_tokens: int64 ``[rows]``, the draft token that is the row's input, ``NO_DRAFT`` at
        roots. Children of the same row are all different.
      draft_parents: int32 ``[rows]``, the row within the sequence (0 is the root) whose token the
        draft follows. A parent precedes its children. In a chain, row i follows row i - 1. The
        entries of roots have no effect.
      cu_rows: int32 ``[sequences + 1]``. Sequence s has rows ``cu_rows[s] .. cu_rows[s + 1]``. A
        padding sequence has none.
      stop: rules that end each sequence.
      max_rows: maximum rows of a sequence, 1 + the longest draft.

    Returns:
      The emitted tokens. Rows from ``cu_rows[-1]`` on belong to no sequence and are undefined.

    Raises:
      ValueError: a sequence has more than ``max_rows`` rows.
    """
    device = sampled.device
    tokens, drafts, parents = sampled.tolist(), draft_tokens.tolist(), draft_parents.tolist()
    remaining, ignores = stop.remaining.tolist(), stop.ignore_eos.tolist()
    eos = frozenset(stop.eos.tolist())
    emitted, kept_rows = [NO_DRAFT] * len(tokens), [NO_ROW] * len(tokens)
    num_emitted = [0] * len(remaining)
    for sequence, (begin, end) in enumerate(pairwise(cu_rows.tolist())):
        if end - begin > max_rows:
            raise ValueError(f"a sequence has {end - begin} rows, more than max_rows={max_rows}")
        if begin == end:
            continue
        own = tokens[begin:end]
        ends = frozenset() if ignores[sequence] else eos
        path = _walk(own, drafts[begin:end], parents[begin:end], ends, remaining[sequence])
        emitted[begin : begin + len(path)] = [own[row] for row in path]
        kept_rows[begin : begin + len(path)] = path
        num_emitted[sequence] = len(path)
    return AcceptedWalk(
        torch.tensor(emitted, dtype=torch.int64, device=device),
        torch.tensor(num_emitted, dtype=torch.int32, device=device),
        torch.tensor(kept_rows, dtype=torch.int32, device=device),
    )


def _walk(
    tokens: list[int], drafts: list[int], parents: list[int], eos: frozenset[int], remaining: int
) -> list[int]:
    """Return the rows of a sequence whose samples the walk emits, in order."""
    path: list[int] = []
    next_row: int | None = 0
    while next_row is not None and len(path) < remaining:
        row = next_row
        path.append(row)
        children = (
            child
            for child in range(row + 1, len(tokens))
            if parents[child] == row and drafts[child] == tokens[row]
        )
        next_row = None if tokens[row] in eos else next(children, None)
    return path
