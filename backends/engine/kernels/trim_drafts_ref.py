"""Draft slots of a step under a budget, in torch: the likeliest of all sequences.

A slot's survival is the chance that it and all drafts before it are accepted, so the sum of the
survivals of the slots that are verified is the expected number of accepted tokens. The largest ones
maximise it under a budget, and since survivals fall along a draft, they are the first slots of
every sequence: no slot is verified without its parent.

Source: a budget shared by the trees of all requests, largest survival first, as in AdaServe (arXiv
2501.12162).
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class TrimmedDrafts(NamedTuple):
    """The slots of a step."""

    kept: torch.Tensor
    """int32 ``[sequences]``: how many leading slots of each sequence are verified."""
    cu_rows: torch.Tensor
    """int32 ``[sequences + 1]``: where the rows of each sequence begin, one for its last token and
    one for each kept slot; an inactive sequence has none."""


def trim_drafts(
    survivals: torch.Tensor, valid: torch.Tensor, active: torch.Tensor, budget: torch.Tensor
) -> TrimmedDrafts:
    """Keeps the ``budget`` largest survivals; of equals the lowest slots, then sequences.

    Args:
      survivals: float32 ``[sequences, max_slots]``, never rising along a row, not NaN. A survival
        of 0 is no slot: it would never be accepted.
      valid: int32 ``[sequences]``, slots of each sequence; what lies behind is not looked at.
      active: int8 or bool ``[sequences]``; others get no slot and no row.
      budget: int32 scalar, slots of all sequences; below 0 it counts as 0.

    Returns:
      The kept slots and the rows that they make.
    """
    sequences, max_slots = survivals.shape
    slots = torch.arange(max_slots, device=survivals.device)
    runs = active != 0
    exists = (slots < valid[:, None]) & (survivals > 0) & runs[:, None]
    # Slot by slot, so that a stable sort has equals in the order in which they are kept.
    by_slot = survivals.masked_fill(~exists, 0).T.reshape(-1)
    order = by_slot.sort(descending=True, stable=True).indices
    chosen = torch.zeros_like(by_slot, dtype=torch.bool)
    chosen[order] = torch.arange(by_slot.shape[0], device=by_slot.device) < budget
    kept = (chosen.view(max_slots, sequences).T & exists).sum(dim=1, dtype=torch.int32)
    ends = ((1 + kept) * runs).cumsum(0)
    return TrimmedDrafts(kept, torch.cat([ends.new_zeros(1), ends]).to(torch.int32))
