"""Chains of drafts sampled from a model, one token at a time, for many sequences together.

Drafts use the same sampling as the target: the noise of their position, after the same grammar,
bias, penalties and filters. The draft model and the target therefore agree on a token if they have
the same distribution.

A draft always complies with the grammar. Verification therefore never shortens a draft because of a
forbidden token, which would bias the distribution under `verify: rejection`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from draftgate.backends.core.drafts import PER_MILLE, Draft
from draftgate.backends.core.proposer import DraftRequest
from draftgate.backends.core.sequence import Sequence
from draftgate.backends.core.steps import SequenceWork, StepPlan
from draftgate.backends.engine.inputs import Feed
from draftgate.backends.engine.kernels.sample_verify_ref import filtered_scores
from draftgate.backends.engine.logits import adjust, forbid_rows, row_masks
from draftgate.backends.engine.sampler import draw_tokens, row_sampling

Forward = Callable[[Many[Feed]], Tensor]
"""Runs feeds of one sampled row each, and returns logits, float32 [feeds, vocab_size]."""

Observe = Callable[[int, float], None]
"""Receives the rows of a pass and the seconds until its tokens were sampled."""


@dataclass(slots=True)
class _Chain:
    """A draft in progress.

    Attributes:
        sequence: a copy of the sequence with the drafts appended.
        confirmed: number of tokens of the sequence without drafts.
        distributions: one [vocab_size] per draft, empty unless rejection needs them.
    """

    sequence: Sequence
    confirmed: int
    max_tokens: int
    evidence: int = 0
    distributions: list[Tensor] = field(default_factory=list)

    @property
    def drafted(self) -> tuple[int, ...]:
        return tuple(self.sequence.token_ids[self.confirmed :])

    def draft(self) -> Draft:
        distributions = torch.stack(self.distributions) if self.distributions else None
        return Draft(self.drafted, evidence=self.evidence, distributions=distributions)


@torch.inference_mode()
def draw_chains(
    requests: Many[DraftRequest],
    first_feeds: Many[Feed],
    next_feed: Callable[[int, int, int], Feed],
    forward: Forward,
    observe: Observe,
    *,
    eos_ids: frozenset[int],
    keep_distributions: bool,
) -> list[Draft]:
    """Return a chain of `max_tokens` drafts for each request.

    Args:
        requests: the requests, each for at least one token.
        first_feeds: the feed for each request's first draft, up to the sequence's last token.
        next_feed: returns the feed for the next draft, given the index of a request, and the
            position and token of its latest draft.
        forward: runs the model.
        observe: receives the rows and the seconds of each pass.
        eos_ids: tokens that end a sequence, all below the vocabulary's size.
        keep_distributions: whether sampled drafts carry their distributions, for rejection.
    """
    chains = [
        _Chain(
            replace(request.sequence, token_ids=request.sequence.token_ids[:]),
            len(request.sequence.token_ids),
            request.max_tokens,
        )
        for request in requests
    ]
    feeds = dict(enumerate(first_feeds))
    while feeds:
        started_s = time.perf_counter()
        fed = list(feeds.values())
        tokens = _draw([chains[i] for i in feeds], forward(fed), eos_ids, keep_distributions)
        rows = sum(len(feed.token_ids) for feed in fed)
        observe(rows, time.perf_counter() - started_s)
        for index, token in zip(list(feeds), tokens, strict=True):
            chain = chains[index]
            position = len(chain.sequence.token_ids)
            chain.sequence.token_ids.append(token)
            if position + 1 - chain.confirmed < chain.max_tokens:
                feeds[index] = next_feed(index, position, token)
            else:
                del feeds[index]
    return [chain.draft() for chain in chains]


def _draw(
    chains: Many[_Chain], logits: Tensor, eos_ids: frozenset[int], keep_distributions: bool
) -> list[int]:
    """Sample the next token of each chain, and store its evidence and distributions."""
    plan = StepPlan(tuple(last_token(chain.sequence) for chain in chains))
    masks = {
        row: found[-1]
        for row, chain in enumerate(chains)
        if (found := row_masks(chain.sequence, Draft(chain.drafted)))
    }
    forbid_rows(logits, [*masks], [*masks.values()])
    adjust(plan, logits, eos_ids)
    tokens = draw_tokens(plan, logits, "coupled")
    if not chains[0].drafted:
        chances = torch.softmax(logits, dim=1).gather(1, tokens[:, None])[:, 0].tolist()
        for chain, chance in zip(chains, chances, strict=True):
            chain.evidence = round(PER_MILLE * chance)
    if keep_distributions:
        scores = filtered_scores(logits, row_sampling(plan, logits.device))
        for chain, distribution in zip(chains, torch.softmax(scores, dim=1), strict=True):
            if chain.sequence.request.sampling.temperature > 0:
                chain.distributions.append(distribution)
    return tokens.tolist()


def last_token(sequence: Sequence) -> SequenceWork:
    """Return the work that samples the token after the end of a sequence."""
    last = len(sequence.token_ids) - 1
    return SequenceWork(sequence, last, (sequence.token_ids[last],), samples=True)
