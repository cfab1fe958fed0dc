"""Coupled verification is sampling: the torch definition of the token at a position.

The token of a row (one output position of one sequence) is

    T = 0:  argmax(logits)
    T > 0:  argmax over kept tokens of (logits / T + g),   g = Gumbel(seed, choice, position, token)

The token has exactly the distribution softmax(logits / T) restricted to the kept tokens. The lowest
id wins ties. Verification accepts a draft token if and only if it equals the token of its position,
so the text does not depend on the drafts (``accept_walk_ref``).

Filters apply in the order temperature, top-k, top-p, min-p. They keep prefixes of one order: logit
descending, id ascending. A cut-off is therefore a pair (logit, id), and no filter renormalises.
top-k = 1 equals greedy exactly:

    top-k   the first k tokens
    top-p   of those, the shortest prefix with at least p of their mass (at least one token)
    min-p   of those, tokens with logits / T >= max + ln(min_p)

The filters count mass in integers, floor(exp(logits / T - max) * 2**40). Integer sums do not depend
on their order. Neither the number of rows, the tiling nor the algorithm can therefore move a
cut-off. A vocabulary of 2**18 fits in 58 bits and loses at most 2**-22 of the largest weight.

Preconditions: logits do not contain NaN or +inf (-inf marks forbidden tokens), and logits / T is
finite for finite logits.

Cost of the torch functions per row of V float32: greedy sampling reads 4V bytes once. Random
sampling adds the noise (``noise``) and three passes. Only rows with top-k or top-p search a
cut-off, first in the 256 largest logits, then in the sorted row.

Source: Daliri, Musco, Suresh, "Coupling without Communication and Drafter-Invariant Speculative
Decoding" (arXiv 2408.07978).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from draftgate.backends.engine.kernels import noise

MASS_UNIT: Final = 2.0**40
"""Integer weight of the most likely token."""

_CANDIDATES: Final = 256


class RowSampling(NamedTuple):
    """Sampling parameters, one entry per row of logits. All tensors are ``[rows]``.

    Attributes:
      temperature: float32. 0 is greedy, without noise and filters.
      top_k: int32. Values outside 1 to the vocabulary's size - 1 are off.
      top_p: float32. 1 or more is off.
      min_p: float32 in [0, 1]. 0 is off.
      seed: int64, the bit pattern of an unsigned 64-bit seed.
      choice: int32, index of the completion among ``n``.
      position: int32, absolute position in the sequence of the sampled token.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seed: Tensor
    choice: Tensor
    position: Tensor

    def select(self, rows: Tensor) -> RowSampling:
        """Return the parameters of the rows with these indices."""
        return RowSampling(*(tensor[rows] for tensor in self))


def draw(logits: Tensor, rows: RowSampling) -> Tensor:
    """Return the token of rows that all have a positive temperature: int64 ``[rows]``."""
    scores = filtered_scores(logits, rows)
    scores += noise.gumbel(
        rows.seed, rows.choice, rows.position, noise.PURPOSE_OUTPUT, logits.shape[1]
    )
    return _argmax(scores)


def sample(
    logits: Tensor, rows: RowSampling, draw: Callable[[Tensor, RowSampling], Tensor] = draw
) -> Tensor:
    """Return the token of every row.

    Args:
      logits: float32, bfloat16 or float16 ``[rows, vocab]``, contiguous, not modified.
      rows: parameters per row.
      draw: function with the results of ``draw``.

    Returns:
      int64 ``[rows]``. The token of a row depends on that row alone.
    """
    logits = logits.float()
    drawn = rows.temperature > 0
    if bool(drawn.all()):
        return draw(logits, rows)
    tokens = torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device)
    greedy = (~drawn).nonzero()[:, 0]
    tokens[greedy] = _argmax(logits[greedy])
    if greedy.shape[0] < logits.shape[0]:
        index = drawn.nonzero()[:, 0]
        tokens[index] = draw(logits[index], rows.select(index))
    return tokens


def filtered_scores(logits: Tensor, rows: RowSampling) -> Tensor:
    """Return ``logits / T`` with -inf for tokens that the filters remove: float32 [rows, vocab].

    Every temperature must be positive. ``sample`` draws from the softmax of the result.
    """
    scores = logits / rows.temperature[:, None]
    vocab = logits.shape[1]
    if not has_filter(rows, vocab):
        return scores
    has_cutoff = _has_cutoff(rows, vocab)
    if bool((rows.min_p > 0).any()):
        floor = scores.amax(dim=1) + rows.min_p.log()
        scores.masked_fill_(scores < floor[:, None], -torch.inf)
    if bool(has_cutoff.any()):
        index = has_cutoff.nonzero()[:, 0]
        picked = logits[index]
        logit, token = _cutoffs(picked, rows.select(index))
        scores[index] = scores[index].masked_fill_(_is_cut(picked, logit, token), -torch.inf)
    return scores


def has_filter(rows: RowSampling, vocab: int) -> bool:
    """Return whether a filter of any row may remove tokens."""
    return bool((_has_cutoff(rows, vocab) | (rows.min_p > 0)).any())


def _has_cutoff(rows: RowSampling, vocab: int) -> Tensor:
    return ((rows.top_k > 0) & (rows.top_k < vocab)) | (rows.top_p < 1)


def _argmax(scores: Tensor) -> Tensor:
    """Return the first index of the maximum of every row."""
    if scores.device.type == "cpu":
        # torch returns the first index on a CPU, in a single pass.
        return scores.argmax(dim=1)
    ids = torch.arange(scores.shape[1], device=scores.device)
    best = scores.amax(dim=1, keepdim=True)
    return torch.where(scores == best, ids, scores.shape[1] - 1).amin(dim=1)


def _is_cut(logits: Tensor, logit: Tensor, token: Tensor) -> Tensor:
    """Return which tokens are after the pair (logit, token) of their row: bool [rows, vocab]."""
    ids = torch.arange(logits.shape[1], device=logits.device)
    limit = logit[:, None]
    return (logits < limit) | ((logits == limit) & (ids > token[:, None]))


def _cutoffs(logits: Tensor, rows: RowSampling) -> tuple[Tensor, Tensor]:
    """Return the last kept pair of every row: float32 logit [rows], int64 id [rows]."""
    vocab = logits.shape[1]
    width = min(vocab, _CANDIDATES)
    logit, ties, found = _cutoffs_among(logits, rows, width)
    if not bool(found.all()):
        index = (~found).nonzero()[:, 0]
        logit[index], ties[index], _ = _cutoffs_among(logits[index], rows.select(index), vocab)
    return logit, _tie_ids(logits, logit, ties)


def _cutoffs_among(logits: Tensor, rows: RowSampling, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Search the cut-offs among the ``width`` largest logits of every row.

    Returns:
      The logit of the last kept token, the number of kept tokens with that logit, and whether the
      cut-off was found, each ``[rows]``.
    """
    vocab = logits.shape[1]
    temperature = rows.temperature[:, None]
    values = _largest(logits, width)
    limit = torch.where((rows.top_k > 0) & (rows.top_k < vocab), rows.top_k, vocab)
    limit = limit.to(torch.int64)[:, None]
    top = values[:, :1] / temperature
    weights = _mass(values / temperature - top)
    weights *= torch.arange(width, device=logits.device) < limit
    mass = weights.cumsum(dim=1)
    has_top_p = (rows.top_p < 1)[:, None]
    total = mass[:, -1:]
    if width < vocab and bool((has_top_p & (limit == vocab)).any()):
        everything = _mass(logits / temperature - top).sum(dim=1, keepdim=True)
        total = torch.where(limit == vocab, everything, total)
    target = _mass_target(rows.top_p[:, None], total)
    kept = torch.where(has_top_p, (mass < target).sum(dim=1, keepdim=True) + 1, limit)
    found = kept <= width
    # The total of top-p is unknown unless the candidates include all top-k tokens.
    found &= (limit <= width) | (limit == vocab)
    kept = kept.clamp_(max=width)
    logit = values.gather(1, kept - 1)
    ties = kept - (values > logit).sum(dim=1, keepdim=True)
    return logit[:, 0], ties[:, 0], found[:, 0]


def _largest(logits: Tensor, width: int) -> Tensor:
    """Return the ``width`` largest logits of every row, descending: float32 [rows, width]."""
    if width < logits.shape[1] or logits.device.type != "cpu":
        return logits.topk(width, dim=1).values
    # NumPy sorts a row of 4096 in 44 us, torch in 250 us (a single thread, AVX-512).
    return torch.from_numpy(np.sort(logits.numpy(), axis=1)[:, ::-1].copy())


def _mass(log_ratio: Tensor) -> Tensor:
    """Return ``floor(exp(x) * 2**40)`` as int64, and overwrite the argument."""
    return log_ratio.exp_().mul_(MASS_UNIT).to(torch.int64)


def _mass_target(top_p: Tensor, total: Tensor) -> Tensor:
    """Return the integer mass that top-p must reach: ``max(1, ceil(p * total))``, int64."""
    product = top_p.to(torch.float64) * total.to(torch.float64)
    return torch.minimum(product.ceil_().to(torch.int64).clamp_(min=1), total)


def _tie_ids(logits: Tensor, logit: Tensor, ties: Tensor) -> Tensor:
    """Return the id of the ``ties``-th token (from 1, by id) whose logit is ``logit``."""
    equal = logits == logit[:, None]
    token = torch.full_like(ties, logits.shape[1])
    partial = (equal.sum(dim=1) != ties).nonzero()[:, 0]
    if partial.shape[0]:
        order = equal[partial].to(torch.int32).cumsum(dim=1)
        token[partial] = (order >= ties[partial, None]).to(torch.int8).argmax(dim=1)
    return token
