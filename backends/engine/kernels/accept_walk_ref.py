"""Acceptance of tree drafts, in torch: from each row to the draft that equals its sample.

The rows of a sequence are the root, whose input is the sequence's last confirmed token, and one
row per draft token, depth first. The walk starts at the root. It emits the sample of a row and goes
to the row of the draft token that follows there and equals the sample; a sample without such a
draft is the last one (the bonus token, or the correction). So a draft is accepted iff it equals the
token of its position, and the text does not depend on what was drafted (``sample_verify_ref``).

The walk also ends behind an end-of-sequence token, which is emitted, and with the last token that
the sequence may still emit.

Source: tree verification as in SpecInfer (arXiv 2305.09781), with samples that are coupled.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Final, NamedTuple

import torch

NO_DRAFT: Final = -1
"""Draft token of a row that has none; equals no token."""

NO_ROW: Final = -1
"""Place of a token that was not emitted."""


class StopRules(NamedTuple):
    """When a sequence is finished."""

    remaining: torch.Tensor
    """int32 ``[sequences]``: tokens that may still be emitted; with none the walk emits nothing."""
    eos: torch.Tensor
    """int64 ``[num_eos]``: tokens that end a sequence, the same for all; may be empty."""
    ignore_eos: torch.Tensor
    """int8 or bool ``[sequences]``: whether the sequence goes on behind such a token."""


class TokenHistory(NamedTuple):
    """Tokens of many sequences, of which a step has some."""

    tokens: torch.Tensor
    """int32 ``[max_sequences, max_len]``, unit last stride."""
    rows: torch.Tensor
    """int32 ``[sequences]``: the row of each sequence of the step; unused for padding."""


class Acceptance(NamedTuple):
    """What a step emits."""

    emitted: torch.Tensor
    """int64 ``[rows]``: emitted tokens from each sequence's first row on, ``NO_DRAFT`` behind."""
    num_emitted: torch.Tensor
    """int32 ``[sequences]``: accepted drafts and the token behind them; 0 for padding."""
    finished: torch.Tensor
    """int8 ``[sequences]``: 1 where a rule stops the sequence; 0 for padding."""
    kept_rows: torch.Tensor
    """int32 ``[rows]``: the row, within the sequence, of each emitted token's sample; ``NO_ROW``
    behind. The accepted draft of depth d >= 1 stands at place ``kept_rows[d] - 1`` of the draft."""


def accept_walk(
    sampled: torch.Tensor,
    draft_tokens: torch.Tensor,
    draft_parents: torch.Tensor,
    cu_rows: torch.Tensor,
    stop: StopRules,
    seq_lens: torch.Tensor,
    *,
    max_rows: int,
    history: TokenHistory | None = None,
) -> Acceptance:
    """Walks the tree drafts of a ragged batch.

    Args:
      sampled: int64 ``[rows]``, the token drawn from each row's logits.
      draft_tokens: int64 ``[rows]``, the token that was the row's input if it is a draft,
        ``NO_DRAFT`` at roots. Drafts that follow one row are all different.
      draft_parents: int32 ``[rows]``, the row within the sequence, root 0, whose token the draft
        follows; less than the draft's own (in a chain row i follows row i - 1). Unused at roots.
      cu_rows: int32 ``[sequences + 1]``, rows of sequence s are ``cu_rows[s] .. cu_rows[s + 1]``;
        none for padding.
      stop: when sequences are finished.
      seq_lens: int32 ``[sequences]``, tokens of each sequence; grows by what is emitted.
      max_rows: most rows of a sequence: 1 and the longest draft.
      history: gets the emitted tokens at the old length of each sequence, where they must fit.

    Returns:
      What is emitted. Rows behind ``cu_rows[-1]`` belong to no sequence and are undefined.

    Raises:
      ValueError: a sequence has more than ``max_rows`` rows.
    """
    device = sampled.device
    tokens, drafts, parents = sampled.tolist(), draft_tokens.tolist(), draft_parents.tolist()
    remaining, ignores, lengths = (
        stop.remaining.tolist(),
        stop.ignore_eos.tolist(),
        seq_lens.tolist(),
    )
    eos = frozenset(stop.eos.tolist())
    emitted, kept_rows = [NO_DRAFT] * len(tokens), [NO_ROW] * len(tokens)
    num_emitted, finished = [0] * len(remaining), [0] * len(remaining)
    for sequence, (begin, end) in enumerate(pairwise(cu_rows.tolist())):
        if end - begin > max_rows:
            raise ValueError(f"{end - begin} rows of a sequence, at most {max_rows} were announced")
        if begin == end:
            continue
        own = tokens[begin:end]
        ends = frozenset() if ignores[sequence] else eos
        path = _walk(own, drafts[begin:end], parents[begin:end], ends, remaining[sequence])
        text = [own[row] for row in path]
        emitted[begin : begin + len(path)] = text
        kept_rows[begin : begin + len(path)] = path
        num_emitted[sequence] = len(path)
        spent = len(path) >= remaining[sequence]
        finished[sequence] = int(spent or text[-1] in ends)
        if history is not None:
            first = lengths[sequence]
            row = history.tokens[int(history.rows[sequence])]
            row[first : first + len(text)] = torch.tensor(text, dtype=torch.int32, device=device)
    counts = torch.tensor(num_emitted, dtype=torch.int32, device=device)
    seq_lens += counts
    return Acceptance(
        torch.tensor(emitted, dtype=torch.int64, device=device),
        counts,
        torch.tensor(finished, dtype=torch.int8, device=device),
        torch.tensor(kept_rows, dtype=torch.int32, device=device),
    )


def _walk(
    tokens: list[int], drafts: list[int], parents: list[int], eos: frozenset[int], remaining: int
) -> list[int]:
    """Returns the rows of one sequence whose samples are emitted, in order."""
    path: list[int] = []
    ahead: int | None = 0
    while ahead is not None and len(path) < remaining:
        row = ahead
        path.append(row)
        children = (
            child
            for child in range(row + 1, len(tokens))
            if parents[child] == row and drafts[child] == tokens[row]
        )
        ahead = None if tokens[row] in eos else next(children, None)
    return path
