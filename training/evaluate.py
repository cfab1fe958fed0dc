"""Held-out measurements: loss, loss by position, and agreement of draft and target."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

POSITION_EDGES = (0, 128, 256, 512, 1024, 2048, 4096, 8192)
"""Bucket borders in tokens from the start of the window."""


@torch.no_grad()
def token_losses(model: LlamaForCausalLM, windows: Tensor, *, batch_tokens: int = 8192) -> Tensor:
    """Return the cross-entropy in nats of every target in windows [W, L + 1]: [W, L]."""
    rows = max(1, batch_tokens // windows.shape[1])
    losses = []
    for part in windows.split(rows):
        hidden = model.model(input_ids=part[:, :-1], use_cache=False).last_hidden_state
        states = hidden.flatten(0, 1).split(1024)
        wanted = part[:, 1:].flatten().split(1024)
        for state, label in zip(states, wanted, strict=True):
            logits = model.lm_head(state).float()
            losses.append(torch.nn.functional.cross_entropy(logits, label, reduction="none"))
    return torch.cat(losses).view(len(windows), -1)


def by_position(losses: Tensor) -> dict[str, float]:
    """Return the mean of losses [W, L] for each bucket of positions."""
    edges = [edge for edge in POSITION_EDGES if edge <= losses.shape[1]]
    return {
        f"{low}-{high}": round(losses[:, low:high].mean().item(), 4)
        for low, high in pairwise(edges)
    }


@dataclass(frozen=True)
class Agreement:
    """Shares of positions (0..1) at which the draft picks the target's token."""

    greedy: float
    coupled: float
    positions: int


def _gumbel(shape: torch.Size, generator: torch.Generator) -> Tensor:
    uniform = torch.rand(shape, generator=generator).clamp_(1e-12, 1 - 1e-7)
    return -torch.log(-torch.log(uniform))


@torch.no_grad()
def agreement(
    target: LlamaForCausalLM,
    draft: LlamaForCausalLM,
    windows: Tensor,
    *,
    temperature: float = 0.8,
    seed: int = 0,
) -> Agreement:
    """Compare teacher-forced choices over windows [W, L + 1].

    In the coupled comparison, both models sample by argmax(logits / temperature + g) with the same
    Gumbel noise g.
    """
    generator = torch.Generator().manual_seed(seed)
    greedy = coupled = positions = 0
    for row in windows:
        wide = target(input_ids=row[None, :-1], use_cache=False).logits[0].float()
        small = draft(input_ids=row[None, :-1], use_cache=False).logits[0].float()
        noise = _gumbel(wide.shape, generator)
        greedy += int((wide.argmax(-1) == small.argmax(-1)).sum())
        picks = [(logits / temperature + noise).argmax(-1) for logits in (wide, small)]
        coupled += int((picks[0] == picks[1]).sum())
        positions += len(wide)
    return Agreement(greedy / positions, coupled / positions, positions)
