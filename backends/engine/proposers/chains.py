"""Drafts drawn by a model, token after token, for many sequences at once.

A draft is drawn as the target draws: with the noise of the position (`coupled`, contract), behind
the same grammar, bias, penalties and filters. Where draft model and target agree on a law they then
agree on the token, and a draft never is what the grammar forbids, so none is ever cut by its token:
under `verify: rejection` that would bend the law.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from draftgate.backends.core.drafts import Draft
from draftgate.backends.core.proposer import DraftRequest
from draftgate.backends.core.sequence import Sequence
from draftgate.backends.core.steps import SequenceWork, StepPlan
from draftgate.backends.engine.inputs import Feed
from draftgate.backends.engine.kernels.sample_verify_ref import filtered_scores
from draftgate.backends.engine.logits import adjust, forbid_rows
from draftgate.backends.engine.sampler import draw, row_sampling

PER_MILLE = 1000
"""Unit of a model's evidence: the probability of the first token."""

Forward = Callable[[Many[Feed]], Tensor]
"""Runs feeds of one sampled row each; returns logits, float32 [feeds, vocab_size]."""

Measured = Callable[[Many[Feed], float], None]
"""Hears what was fed for a token of each chain, and the seconds until they were drawn."""


@dataclass(slots=True)
class _Chain:
    """A draft under way.

    Attributes:
        sequence: as if the drafts had been drawn: a copy with more tokens.
        laws: of each draft, [vocab_size]; empty unless rejection needs them.
    """

    sequence: Sequence
    confirmed: int
    most: int
    evidence: int = 0
    laws: list[Tensor] = field(default_factory=list)

    @property
    def drafted(self) -> tuple[int, ...]:
        return tuple(self.sequence.token_ids[self.confirmed :])

    def draft(self) -> Draft:
        law = torch.stack(self.laws) if self.laws else None
        return Draft(self.drafted, evidence=self.evidence, distributions=law)


@torch.inference_mode()
def draw_chains(
    requests: Many[DraftRequest],
    first: Many[Feed],
    following: Callable[[int, int, int], Feed],
    forward: Forward,
    measured: Measured,
    *,
    eos_ids: frozenset[int],
    with_laws: bool,
) -> list[Draft]:
    """Return a chain of `max_tokens` drafts for each request.

    Args:
        requests: at least one token each.
        first: what to feed for the first draft of each: up to the sequence's last token.
        following: given the place of a request, a position and the draft drawn for it, what to
            feed for the next draft.
        forward: the model.
        measured: hears of each depth.
        eos_ids: tokens that end a sequence; all below the vocabulary's size.
        with_laws: whether sampled drafts carry their laws, for rejection.
    """
    chains = [
        _Chain(
            replace(request.sequence, token_ids=request.sequence.token_ids[:]),
            len(request.sequence.token_ids),
            request.max_tokens,
        )
        for request in requests
    ]
    feeds = dict(enumerate(first))
    while feeds:
        started_s = time.perf_counter()
        fed = list(feeds.values())
        tokens = _draw([chains[p] for p in feeds], forward(fed), eos_ids, with_laws=with_laws)
        measured(fed, time.perf_counter() - started_s)
        for place, token in zip(list(feeds), tokens, strict=True):
            chain = chains[place]
            position = len(chain.sequence.token_ids)
            chain.sequence.token_ids.append(token)
            if position + 1 - chain.confirmed < chain.most:
                feeds[place] = following(place, position, token)
            else:
                del feeds[place]
    return [chain.draft() for chain in chains]


def _draw(
    chains: Many[_Chain], logits: Tensor, eos_ids: frozenset[int], *, with_laws: bool
) -> list[int]:
    """Draw the next token of each chain, and note laws and evidence."""
    plan = StepPlan(tuple(_last_token(chain.sequence) for chain in chains))
    for row, chain in enumerate(chains):
        if chain.sequence.grammar is not None:
            mask = chain.sequence.grammar.masks(Draft(chain.drafted))[-1]
            forbid_rows(logits[row : row + 1], [mask])
    adjust(plan, logits, eos_ids)
    tokens = draw(plan, logits, "coupled")
    if not chains[0].drafted:
        chances = torch.softmax(logits, dim=1).gather(1, tokens[:, None])[:, 0].tolist()
        for chain, chance in zip(chains, chances, strict=True):
            chain.evidence = round(PER_MILLE * chance)
    if with_laws:
        laws = torch.softmax(filtered_scores(logits, row_sampling(plan, logits.device)), dim=1)
        for chain, law in zip(chains, laws, strict=True):
            if chain.sequence.request.sampling.temperature > 0:
                chain.laws.append(law)
    return tokens.tolist()


def _last_token(sequence: Sequence) -> SequenceWork:
    """Return the work of which sampling behind the last token is part."""
    last = len(sequence.token_ids) - 1
    return SequenceWork(sequence, last, (sequence.token_ids[last],), samples=True)
