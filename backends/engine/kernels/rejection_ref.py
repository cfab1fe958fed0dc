"""Speculative sampling by rejection: the torch definition of ``verify: rejection``.

A draft ``d`` is a token drawn from a distribution q. ``sample_verify_ref.sample`` draws from a
distribution p, the softmax of the filtered scores. With ``u`` and Gumbel noise ``g`` of the
position:

    accept d    iff   u(purpose 1, d) < p(d) / q(d)
    otherwise         argmax over tokens of (log max(p - q, 0) + g(purpose 2, token))

The token then has exactly the distribution p. The rule accepts d with probability sum min(p, q),
the maximum of all rules. A token that was not drawn (an n-gram) has q(d) = 1. The draft and the
token of a row then go through the same accept walk as in coupled verification. A residual draw is
never d, because p(d) < q(d) whenever the rule rejects d.

Noise of each purpose:

* A draft model draws with purpose 0 at the position of its token. The choice of d has consumed that
  noise, so acceptance and residual draws have purposes of their own.
* The token after the last draft is a plain sample with purpose 0, because its position has no
  draft. An unverified dropped draft may have used this noise, but has influenced no kept token.
  Only information from before the draw of the first dropped token may therefore decide which
  drafts to drop. The dropped tokens and their probabilities may not.
* A rejected draft drops all later drafts, and no emitted token has read their noise. The next
  step draws at these positions again from the same words.

Unlike in coupled verification, the token depends on the draft, so the seed does not determine the
text. The distribution of the text is that of the model in both cases.

Rounding. Probabilities are float32 with an error of about 1e-7. If p and q differ only by rounding,
the residual vanishes. The function then draws the token from p, possibly d again, because the
rejection of d was also a matter of rounding. The function never returns a token outside the support
of p, even if q holds NaN.

Source: Leviathan, Kalman, Matias, "Fast Inference from Transformers via Speculative Decoding"
(arXiv 2211.17192), which also proves the distribution and the acceptance probability.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from draftgate.backends.engine.kernels import noise
from draftgate.backends.engine.kernels.sample_verify_ref import RowSampling, filtered_scores

_ROUNDING: Final = 1e-12
"""Minimum mass of a residual.

A smaller mass is a matter of rounding, because float32 sums have that error.
"""

_IMPOSSIBLE: Final = 2.0**-100
"""Replaces probability 0, whose logarithm takes ten times as long (MKL on a Zen 4, 2026-11-21).

Such a token is never drawn: its logarithm is -69, and the noise is between -2.9 and 16.7. p, and
any residual beyond rounding, has a token with a logarithm over -41 (in a vocabulary of 2**18).
"""


def rejection_sample(
    logits: Tensor, rows: RowSampling, draft_tokens: Tensor, draft_probs: Tensor
) -> Tensor:
    """Return the token of every row: its draft if the rule accepts it, else a residual draw.

    Args:
      logits: float32 ``[rows, vocab]``, contiguous, not modified.
      rows: parameters per row, with positive temperatures.
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
    # Compare with a product, because the quotient would divide by q(d) = 0. p(d) = 0 never accepts.
    accepted = u.gather(1, draft) * draft_probs.gather(1, draft) < target_probs.gather(1, draft)
    return accepted[:, 0]


def _draw_residual(target_probs: Tensor, rows: RowSampling, draft_probs: Tensor) -> Tensor:
    """Draw a token of the distribution max(p - q, 0), normalised, for every row: int64 [rows]."""
    residual, vocab = target_probs - draft_probs, target_probs.shape[1]
    exists = residual.clamp(min=0).sum(dim=1, keepdim=True) > _ROUNDING
    scores = torch.where(exists, residual, target_probs).clamp_(min=_IMPOSSIBLE).log_()
    scores += noise.gumbel(rows.seed, rows.choice, rows.position, noise.PURPOSE_RESIDUAL, vocab)
    return scores.argmax(dim=1)
