"""Trees of drafts from an EAGLE-3 head, grown best first for many sequences together.

A candidate's confidence is the head's probability for it. For a sampled token, it is the
probability under the noise of its position, which the target will add as well: the softmax of the
scores whose maximum the sampler takes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Many

import torch
from torch import Tensor

from draftgate.backends.core.draft_growth import CHILDREN, MAX_TREE_TOKENS, Growth
from draftgate.backends.core.drafts import ROOT, Draft
from draftgate.backends.core.proposer import DraftRequest
from draftgate.backends.core.steps import StepPlan
from draftgate.backends.engine.eagle.head import HeadOutput
from draftgate.backends.engine.inputs import AttentionSpan, Feed, slots_of
from draftgate.backends.engine.kernels import noise
from draftgate.backends.engine.kernels.sample_verify_ref import RowSampling, filtered_scores
from draftgate.backends.engine.numerics import CPU
from draftgate.backends.engine.proposers.chains import Observe, last_token
from draftgate.backends.engine.sampler import row_sampling
from draftgate.backends.engine.transfer import to_device

Read = Callable[[Many[Feed]], HeadOutput]
"""Runs the rows of confirmed tokens, with one sampled row for each request."""

Follow = Callable[[Many[Feed], Tensor], HeadOutput]
"""Runs a row after each of these hidden states, [rows, hidden_size], and samples all rows."""


@torch.inference_mode()
def grow_trees(
    requests: Many[DraftRequest],
    first_feeds: Many[Feed],
    page_tokens: int,
    ragged: bool,
    read: Read,
    follow: Follow,
    observe: Observe,
) -> list[Draft]:
    """Return a tree of up to `max_tokens` drafts for each request.

    Args:
        requests: the requests, whose sequences have neither grammar nor changed logits.
        first_feeds: the feed of each request's rows of confirmed tokens. The following slots of its
            pages are free for the tokens of a tree.
        page_tokens: tokens per page.
        ragged: whether one launch attends all rows (`operators/ragged.py`).
        read: runs the first pass.
        follow: runs the other passes.
        observe: receives the rows and the seconds of each pass.
    """
    growths = [Growth(min(request.max_tokens, MAX_TREE_TOKENS)) for request in requests]
    sampling = row_sampling(
        StepPlan(tuple(last_token(request.sequence) for request in requests)), CPU
    )
    grown: list[tuple[int, int]] = []  # request and token of each row of `hidden`
    hidden: Tensor | None = None
    feeds: Many[Feed] = first_feeds
    new = [(index, ROOT) for index in range(len(requests))]
    while feeds:
        started_s = time.perf_counter()
        if hidden is None:
            output = read(feeds)
            hidden = output.hidden
        else:
            row_of = {each: row for row, each in enumerate(grown)}
            before = [row_of[index, growths[index].parent(node)] for index, node in new]
            output = follow(feeds, hidden[_index(before, hidden.device)])
            hidden = torch.cat([hidden, output.hidden])
        grown += new
        depths = [growths[index].depth(node) for index, node in new]
        likeliest = _likeliest(output.logits, _rows(sampling, new, depths))
        for (index, node), children in zip(new, likeliest, strict=True):
            growths[index].add(node, children)
        rows = sum(len(feed.token_ids) for feed in feeds)
        observe(rows, time.perf_counter() - started_s)
        chosen = [growth.next_unread() for growth in growths]
        new = [(index, node) for index, nodes in enumerate(chosen) for node in nodes]
        feeds = [
            _feed(growth, nodes, first, page_tokens, ragged)
            for growth, nodes, first in zip(growths, chosen, first_feeds, strict=True)
            if nodes
        ]
    return [growth.draft() for growth in growths]


def _feed(growth: Growth, nodes: list[int], first: Feed, page_tokens: int, ragged: bool) -> Feed:
    """Return the feed of tokens of a tree, each of which sees its own path."""
    end = first.start + len(first.token_ids)
    positions = [end + growth.depth(node) - 1 for node in nodes]
    spans = [AttentionSpan(0, end, first.pages)] if ragged else []
    for node, position in zip(nodes, positions, strict=True):
        path = growth.path(node)
        # A path in the slots of its positions is a view for the operators of a CPU.
        if path == list(range(len(path))) and not ragged:
            spans.append(AttentionSpan(1, position, first.pages))
            continue
        slots = slots_of(first.pages, [end + place for place in path], page_tokens)
        spans.append(AttentionSpan(1, position, first.pages, end, tuple(slots)))
    tokens = [growth.tokens(node)[-1] for node in nodes]
    start = end + growth.path(nodes[0])[-1]
    return Feed(tokens, start, first.pages, len(nodes), positions, tuple(spans))


def _likeliest(logits: Tensor, rows: RowSampling) -> list[list[tuple[int, float]]]:
    """Return the likeliest tokens of each row with their probabilities, best first.

    Args:
        logits: float32 [rows, vocab_size], modified in place.
        rows: the parameters of each row, in main memory.
    """
    drawn_rows = [row for row, heat in enumerate(rows.temperature.tolist()) if heat > 0]
    if drawn_rows:
        device = logits.device
        drawn = RowSampling(*(to_device(t[drawn_rows], device) for t in rows))
        sampled = _index(drawn_rows, device)
        noise_rows = (drawn.seed, drawn.choice, drawn.position)
        scores = filtered_scores(logits[sampled], drawn)
        scores += noise.gumbel(*noise_rows, noise.PURPOSE_OUTPUT, logits.shape[1])
        logits[sampled] = scores
    best = torch.softmax(logits, dim=1).topk(CHILDREN, dim=1)
    pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return [list(zip(tokens, chances, strict=True)) for tokens, chances in pairs]


def _rows(sampling: RowSampling, grown: Many[tuple[int, int]], depths: Many[int]) -> RowSampling:
    """Return the sampling parameters of the tokens after tokens of trees.

    Args:
        sampling: parameters of the token after each sequence.
        grown: request of each row, and its token.
        depths: depth of each row's token, 0 for the sequence itself.
    """
    rows = sampling.select(torch.tensor([index for index, _ in grown]))
    return rows._replace(position=rows.position + torch.tensor(depths, dtype=torch.int32))


def _index(rows: list[int], device: torch.device) -> Tensor:
    return to_device(torch.tensor(rows), device)
