"""Prompt look-up, in torch: what followed where the last tokens of a sequence stood before.

For each sequence, the longest n-gram at the end of its history, of ``min_n .. max_n`` tokens, that
also ended earlier; of several earlier places the rightmost, which may overlap the end. The draft is
what followed there. Past the end of the history the repetition goes on: with e tokens up to the end
of the earlier place, draft i is ``history[e + i % (length - e)]``.

Source: prompt look-up decoding (A. Saxena, 2023) and LLMA (arXiv 2304.04487).
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch

from draftgate.backends.engine.kernels.accept_walk_ref import NO_DRAFT

MAX_N: Final = 8
"""Longest n-gram that may be looked for."""


class NgramDrafts(NamedTuple):
    """Chains looked up for the sequences of a step."""

    drafts: torch.Tensor
    """int64 ``[sequences, num_drafts]``: the tokens; ``NO_DRAFT`` where nothing was found."""
    match_lens: torch.Tensor
    """int32 ``[sequences]``: tokens of the n-gram that was found, or 0."""
    valid: torch.Tensor
    """int32 ``[sequences]``: ``num_drafts``, or 0 where nothing was found."""


def ngram_scan(
    history: torch.Tensor,
    rows: torch.Tensor,
    lengths: torch.Tensor,
    *,
    num_drafts: int,
    min_n: int,
    max_n: int,
) -> NgramDrafts:
    """Looks up a draft for every sequence.

    Args:
      history: int32 ``[max_sequences, max_len]``.
      rows: int32 ``[sequences]``, the row of each sequence in the history.
      lengths: int32 ``[sequences]``, tokens of each sequence, at most max_len; 0 for padding,
        whose row is not looked at.
      num_drafts: tokens of a draft, at least 1.
      min_n: tokens of the shortest n-gram.
      max_n: tokens of the longest n-gram.

    Returns:
      The drafts and the lengths of their matches.

    Raises:
      ValueError: not ``1 <= min_n <= max_n <= MAX_N``, or no tokens to draft.
    """
    check_sizes(num_drafts, min_n, max_n)
    sequences, device = lengths.shape[0], history.device
    drafts = torch.full((sequences, num_drafts), NO_DRAFT, device=device)
    match_lens = torch.zeros(sequences, dtype=torch.int32, device=device)
    steps = torch.arange(num_drafts, device=device)
    for sequence, (row, length) in enumerate(zip(rows.tolist(), lengths.tolist(), strict=True)):
        tokens = history[row, :length] if length else history[0, :0]
        n, end = _longest_match(tokens, min_n, max_n)
        if n:
            drafts[sequence] = tokens[end + steps % (length - end)].to(torch.int64)
            match_lens[sequence] = n
    valid = torch.where(match_lens > 0, num_drafts, 0).to(torch.int32)
    return NgramDrafts(drafts, match_lens, valid)


def check_sizes(num_drafts: int, min_n: int, max_n: int) -> None:
    """Raises ValueError for sizes that ``ngram_scan`` does not define."""
    if not 1 <= min_n <= max_n <= MAX_N:
        raise ValueError(f"n-grams of {min_n} to {max_n} tokens; allowed are 1 to {MAX_N}")
    if num_drafts < 1:
        raise ValueError("a draft needs at least one token")


def _longest_match(tokens: torch.Tensor, min_n: int, max_n: int) -> tuple[int, int]:
    """Returns tokens of the n-gram and up to the end of its earlier place; (0, 0) if none."""
    for n in range(min(max_n, tokens.shape[0] - 1), min_n - 1, -1):
        earlier = tokens[:-1].unfold(0, n, 1)
        found = (earlier == tokens[-n:]).all(dim=1).nonzero()
        if found.shape[0]:
            return n, int(found[-1]) + n
    return 0, 0
