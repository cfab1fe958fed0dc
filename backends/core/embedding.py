"""Sequences that are embedded: a prompt and nothing behind it.

They are planned, chunked, shared, preempted and cancelled as all others; what differs is their end.
The step that feeds the last token of the prompt, which no cache holds (`Sequence.sharable_hashes`),
gives that token's hidden state, and no token is drawn.
"""

from __future__ import annotations

from collections.abc import Iterator

from backends.core.sequence import Sequence, SequenceState
from backends.core.steps import SequenceWork, StepPlan, StepResult
from backends.types import Delta


def embedding_work(work: SequenceWork) -> SequenceWork:
    """Return an embedding's part of a step: where others would sample, it pools."""
    return work._replace(samples=False, pools=work.samples)


def embedded(plan: StepPlan, result: StepResult) -> Iterator[Sequence]:
    """Yield the sequences whose embedding a step gave, with it; those that left are passed over."""
    if result.pooled is None:
        return
    pooling = (work.sequence for work in plan.work if work.pools)
    for sequence, pooled in zip(pooling, result.pooled, strict=True):
        if sequence.state is SequenceState.RUNNING:
            sequence.embedding = pooled
            yield sequence


def embedding_delta(sequence: Sequence) -> Delta:
    """Return the one delta of a sequence that was embedded."""
    reason, cached = sequence.finish_reason, sequence.cached_tokens
    return Delta(
        sequence.choice,
        (),
        "",
        finish_reason=reason,
        cached_tokens=cached,
        embedding=sequence.embedding,
    )
