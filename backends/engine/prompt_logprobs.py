"""Log probabilities of a prompt's tokens, from the hidden states of its chunks.

The logits of all rows of a chunk would take more memory than its forward pass: 1.2 GB for 2,048
tokens and a vocabulary of 152k. The functions here compute them for `SCORED_ROWS` rows at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import accumulate
from typing import Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from draftgate.backends.core.steps import ScoredRows, StepPlan
from draftgate.backends.engine.linear import MAX_ROWS, padded_rows
from draftgate.backends.engine.logprobs import RowLogprobs, log_softmax_rows, select_logprobs
from draftgate.backends.engine.transfer import to_device
from draftgate.backends.prompt_logprobs import PromptLogprobs

SCORED_ROWS: Final = MAX_ROWS
"""Rows whose logits are in memory at the same time: the rows of one matrix product."""

Logits = Callable[[Tensor], Tensor]
"""Returns the logits of hidden states: float32 [rows, vocab_size]."""


class ScoredChunk(NamedTuple):
    """The log probabilities of the tokens after the scored rows of a chunk.

    Attributes:
        found: log probabilities of these tokens and of the likeliest tokens.
        ranks: int64 [rows], the number of tokens that are at least as likely.
    """

    found: RowLogprobs
    ranks: Tensor

    def moved(self, move: Callable[[Tensor], Tensor]) -> ScoredChunk:
        """Return the chunk with each tensor passed through a function."""
        return ScoredChunk(RowLogprobs(*map(move, self.found)), move(self.ranks))


def rows_to_score(plan: StepPlan) -> list[int]:
    """Return the rows of a step that give log probabilities of prompts."""
    if not plan.scored:
        return []
    starts = list(accumulate((work.num_tokens for work in plan.work), initial=0))
    found: list[int] = []
    for place, first, rows in plan.scored:
        found += range(starts[place] + first, starts[place] + first + rows)
    return found


def score_rows(
    plan: StepPlan, hidden: Tensor, num_samples: int, logits: Logits
) -> tuple[ScoredChunk, ...]:
    """Return the log probabilities for each entry of `StepPlan.scored`.

    Args:
        plan: the work of the step.
        hidden: [rows, hidden_size], from `Decoder.last_hidden`. The rows to score follow the
            sampled and the pooled rows.
        num_samples: number of sampled rows.
        logits: the LM head.
    """
    chunks = []
    begin = num_samples + len(plan.pooled)
    for scored in plan.scored:
        rows = hidden[begin : begin + scored.rows]
        chunks.append(_score(rows, _targets(plan, scored), _alternatives(plan, scored), logits))
        begin += scored.rows
    return tuple(chunks)


def packed_chunks(chunks: Iterable[ScoredChunk]) -> tuple[PromptLogprobs, ...]:
    """Return chunks in main memory in the form in which workers deliver them."""
    return tuple(
        PromptLogprobs(
            found.top.shape[1],
            _packed(found.sampled, "<f4"),
            _packed(ranks, "<i4"),
            _packed(found.top_ids, "<i4"),
            _packed(found.top, "<f4"),
        )
        for found, ranks in chunks
    )


def _targets(plan: StepPlan, scored: ScoredRows) -> Tensor:
    """Return the tokens after the scored rows: int64 [rows], in main memory."""
    work = plan.work[scored.place]
    begin = work.start + scored.first + 1
    tokens = work.sequence.token_ids[begin : begin + scored.rows]
    return torch.from_numpy(np.array(tokens, dtype=np.int64))


def _alternatives(plan: StepPlan, scored: ScoredRows) -> int:
    return plan.work[scored.place].sequence.request.sampling.prompt_logprobs or 0


def _score(hidden: Tensor, tokens: Tensor, alternatives: int, logits: Logits) -> ScoredChunk:
    parts: list[tuple[Tensor, ...]] = []
    tokens = to_device(tokens, hidden.device)
    for rows, targets in zip(hidden.split(SCORED_ROWS), tokens.split(SCORED_ROWS), strict=True):
        # A product has the same bits for any number of rows if it is padded (`linear`).
        padding = padded_rows(len(rows)) - len(rows)
        padded = torch.nn.functional.pad(rows, (0, 0, 0, padding))
        own = log_softmax_rows(logits(padded)[: len(rows)])
        found = select_logprobs(own, targets, alternatives)
        parts.append((*found, (own >= found.sampled[:, None]).sum(dim=1)))
    *found_columns, ranks = map(torch.cat, zip(*parts, strict=True))
    return ScoredChunk(RowLogprobs(*found_columns), ranks)


def _packed(column: Tensor, dtype: str) -> bytes:
    return column.numpy().astype(dtype).tobytes()
