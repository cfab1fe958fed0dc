"""Speculative sampling by rejection: the torch definition of ``verify: rejection``.

A draft ``d`` was drawn from a law q, and p is the law that ``sample_verify_ref.sample`` draws from:
softmax of the filtered scores. With ``u`` and Gumbel noise ``g`` of the position

    accept d    iff   u(purpose 1, d) < p(d) / q(d)
    otherwise         argmax over tokens of (log max(p - q, 0) + g(purpose 2, token))

so the token has exactly the law p, and d is accepted with probability sum min(p, q), the most
that any rule can reach. A token that was not drawn (an n-gram) has q(d) = 1. Draft and token
of a row then go through the same accept walk as in coupled verification: a residual draw is never
d, because p(d) < q(d) wherever d is rejected.

Which noise may be used where:

* A draft model draws with purpose 0 at the position of its token. Given d that noise is spent:
  acceptance and residual have purposes of their own, which nothing else ever reads.
* Behind the last draft the token is a plain sample, with purpose 0. No draft was verified there,
  and if one was drawn and dropped unseen, its noise has influenced nothing that is kept. Hence the
  rule for whoever drops drafts: by what was known before the first dropped token was drawn, never
  by that token or its probability.
* Behind a rejected draft all later ones are dropped with their noise unread by what is emitted; the
  next step draws at these positions anew, from the same words, which are fresh to it.

Unlike in coupled verification the token depends on the draft, so text is not tied to the seed; its
law is that of the model either way.

Rounding: laws are float32, so probabilities are right to about 1e-7. Where p and q agree but for
rounding the residual vanishes, and the token is drawn from p, d among others: that d was refused
was a matter of rounding too. No token outside the support of p is ever returned, whatever q holds,
NaN included.

Source: Leviathan, Kalman, Matias, "Fast Inference from Transformers via Speculative Decoding"
(arXiv 2211.17192), which also proves the two claims above.
"""

from __future__ import annotations

from typing import Final

import torch

from draftgate.backends.engine.kernels import noise
from draftgate.backends.engine.kernels.sample_verify_ref import RowSampling, filtered_scores

_ROUNDING: Final = 1e-12
"""Mass of a residual that is a matter of rounding: a sum of float32 is not known to that."""

_IMPOSSIBLE: Final = 2.0**-100
"""Stands for probability 0, of which the logarithm takes ten times as long (MKL on a Zen 4,
2026-11-21). Noise lies between -2.9 and 16.7, and a residual beyond rounding, or p, has a token
with a logarithm over -41 (in a vocabulary of 2**18), so what stands at -69 never wins."""


def settle(
    logits: torch.Tensor,
    rows: RowSampling,
    draft_tokens: torch.Tensor,
    draft_law: torch.Tensor,
) -> torch.Tensor:
    """Returns the token of every row: its draft where that is accepted, else a residual draw.

    Args:
      logits: float32 ``[rows, vocab]``, contiguous; not modified.
      rows: parameters per row; every temperature is positive.
      draft_tokens: int64 ``[rows]``, the draft of each row.
      draft_law: float32 ``[rows, vocab]``, probabilities of the law each draft was drawn from.

    Returns:
      int64 ``[rows]``. A row's token depends on that row alone.
    """
    target_law = torch.softmax(filtered_scores(logits, rows), dim=1)
    accepted = _accepts(target_law, rows, draft_tokens, draft_law)
    return torch.where(accepted, draft_tokens, _draw_residual(target_law, rows, draft_law))


def _accepts(
    target_law: torch.Tensor,
    rows: RowSampling,
    draft_tokens: torch.Tensor,
    draft_law: torch.Tensor,
) -> torch.Tensor:
    """Returns which drafts are accepted: bool [rows]."""
    draft = draft_tokens[:, None]
    coin = noise.uniform(
        rows.seed, rows.choice, rows.position, noise.PURPOSE_ACCEPT, target_law.shape[1]
    ).gather(1, draft)
    # A product instead of the quotient: q(d) = 0 divides by nothing, and p(d) = 0 never accepts.
    return (coin * draft_law.gather(1, draft) < target_law.gather(1, draft))[:, 0]


def _draw_residual(
    target_law: torch.Tensor, rows: RowSampling, draft_law: torch.Tensor
) -> torch.Tensor:
    """Returns a token of the law max(p - q, 0), normalised, for every row: int64 [rows]."""
    residual = target_law - draft_law
    exists = residual.clamp(min=0).sum(dim=1, keepdim=True) > _ROUNDING
    scores = torch.where(exists, residual, target_law).clamp_(min=_IMPOSSIBLE).log_()
    scores += noise.gumbel(
        rows.seed, rows.choice, rows.position, noise.PURPOSE_RESIDUAL, target_law.shape[1]
    )
    return scores.argmax(dim=1)
