"""Speculative sampling by rejection: the torch definition of ``verify: rejection``.

A draft ``d`` was drawn from a distribution q, and p is the distribution that
``sample_verify_ref.sample`` draws from: the softmax of the filtered scores. With ``u`` and Gumbel
noise ``g`` of the position:

    accept d    iff   u(purpose 1, d) < p(d) / q(d)
    otherwise         argmax over tokens of (log max(p - q, 0) + g(purpose 2, token))

The token then has exactly the distribution p, and d is accepted with probability sum min(p, q), the
most that any rule can reach. A token that was not drawn (an n-gram) has q(d) = 1. Draft and token
of a row then go through the same accept walk as in coupled verification. A residual draw is never
d, because p(d) < q(d) whenever d is rejected.

Which noise may be used where:

* A draft model draws with purpose 0 at the position of its token. Given d that noise is spent, so
  acceptance and residual have purposes of their own, which nothing else reads.
* After the last draft the token is a plain sample, with purpose 0. No draft was verified there. If
  one was drawn and dropped unseen, its noise has influenced nothing that is kept. Drafts may
  therefore be dropped only by information from before the first dropped token was drawn, never by
  that token or its probability.
* After a rejected draft all later ones are dropped, and no emitted token has read their noise. The
  next step draws at these positions again, from the same words.

Unlike in coupled verification, the token depends on the draft, so the text is not determined by the
seed. Its distribution is that of the model either way.

Rounding: probabilities are float32, right to about 1e-7. If p and q differ only by rounding, the
residual vanishes and the token is drawn from p, possibly d again: rejecting d was a matter of
rounding, too. No token outside the support of p is ever returned, whatever q holds, NaN included.

Source: Leviathan, Kalman, Matias, "Fast Inference from Transformers via Speculative Decoding"
(arXiv 2211.17192), which also proves the two claims above.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from draftgate.backends.engine.kernels import noise
from draftgate.backends.engine.kernels.sample_verify_ref import RowSampling, filtered_scores

_ROUNDING: Final = 1e-12
"""Residuals of less mass are a matter of rounding: float32 sums are not exact to that."""

_IMPOSSIBLE: Final = 2.0**-100
"""Replaces probability 0, whose logarithm takes ten times as long (MKL on a Zen 4, 2026-11-21).

It never wins: its logarithm is -69 and noise lies between -2.9 and 16.7, while p, and any residual
beyond rounding, has a token with a logarithm over -41 (in a vocabulary of 2**18)."""


def rejection_sample(
    logits: Tensor, rows: RowSampling, draft_tokens: Tensor, draft_probs: Tensor
) -> Tensor:
    """Return the token of every row: its draft if that is accepted, else a residual draw.

    Args:
      logits: float32 ``[rows, vocab]``, contiguous; not modified.
      rows: parameters per row; every temperature is positive.
      draft_tokens: int64 ``[rows]``, the draft of each row.
      draft_probs: float32 ``[rows, vocab]``, the distribution that each draft was drawn from.

    Returns:
      int64 ``[rows]``. The token of a row depends on that row alone.
    """
    target_probs = torch.softmax(filtered_scores(logits, rows), dim=1)
    accepted = _accepts(target_probs, rows, draft_tokens, draft_probs)
    return torch.where(accepted, draft_tokens, _draw_residual(target_probs, rows, draft_probs))


def _accepts(
    target_probs: Tensor, rows: RowSampling, draft_tokens: Tensor, draft_probs: Tensor
) -> Tensor:
    """Return which drafts are accepted: bool [rows]."""
    draft, vocab = draft_tokens[:, None], target_probs.shape[1]
    u = noise.uniform(rows.seed, rows.choice, rows.position, noise.PURPOSE_ACCEPT, vocab)
    # A product instead of the quotient: q(d) = 0 divides by nothing, and p(d) = 0 never accepts.
    accepted = u.gather(1, draft) * draft_probs.gather(1, draft) < target_probs.gather(1, draft)
    return accepted[:, 0]


def _draw_residual(target_probs: Tensor, rows: RowSampling, draft_probs: Tensor) -> Tensor:
    """Draw a token of the distribution max(p - q, 0), normalised, for every row: int64 [rows]."""
    residual, vocab = target_probs - draft_probs, target_probs.shape[1]
    exists = residual.clamp(min=0).sum(dim=1, keepdim=True) > _ROUNDING
    scores = torch.where(exists, residual, target_probs).clamp_(min=_IMPOSSIBLE).log_()
    scores += noise.gumbel(rows.seed, rows.choice, rows.position, noise.PURPOSE_RESIDUAL, vocab)
    return scores.argmax(dim=1)
