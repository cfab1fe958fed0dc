"""Which shapes the steps of a GPU have: few, so that each can be captured in a graph beforehand."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from typing import Final

from draftgate.backends.engine.gpu.layout import StepShape

ROW_BUCKETS: Final = (1, 2, 4, *range(8, 64, 8), *range(64, 128, 16), *range(128, 257, 32))
"""Rows of captured steps. Up to about 184 a step of bfloat16 weights takes the time of reading them
(790 TFLOP/s over 4.3 TB/s, an H200's data sheet), so padding is nearly free; steps of more rows are
long beside the launches of their kernels, and run without a graph. The spacing keeps padding below
an eighth from 64 rows on, which is where attention and activations begin to count. Chosen from the
data sheet (2026-11-21), not measured."""

CONTEXT_FACTOR: Final = 4
FIRST_CONTEXT: Final = 2048
"""Contexts that steps are captured for, in slots: the first, then so many times it and on. A grid
of attention covers the bound, and each wave of empty programs costs a few microseconds
(`paged_attention`): with a factor of 4 at most three quarters are empty. Not measured."""


@dataclass(frozen=True)
class Shapes:
    """The shapes of a model's steps.

    Attributes:
        most_rows: of a captured step; 0 captures none.
        most_sequences: of any step.
        most_context: slots of the longest context.
        page_tokens: slots of a page.
    """

    most_rows: int
    most_sequences: int
    most_context: int
    page_tokens: int

    @cached_property
    def row_buckets(self) -> tuple[int, ...]:
        """Rows of captured steps, ascending."""
        return tuple(takewhile(lambda rows: rows <= self.most_rows, ROW_BUCKETS))

    @cached_property
    def contexts(self) -> tuple[int, ...]:
        """Bounds on the longest context of a step, ascending; the last holds any."""
        bounds = [FIRST_CONTEXT]
        while bounds[-1] < self.most_context:
            bounds.append(bounds[-1] * CONTEXT_FACTOR)
        return tuple(bounds)

    def captured(self) -> Iterator[StepShape]:
        """Yield the shapes to capture, the largest first, so that the others find its memory."""
        for rows in reversed(self.row_buckets):
            for context in reversed(self.contexts):
                yield self._shape(rows, context)

    def shape(self, rows: int, sequences: int, context: int) -> tuple[StepShape, bool]:
        """Return the shape for a step, and whether it is one that is captured.

        Args:
            rows: tokens, at least 1.
            sequences: parts, at most `most_sequences`.
            context: slots of the longest one.
        """
        bound = next(bound for bound in self.contexts if bound >= context)
        for bucket in self.row_buckets:
            if rows <= bucket and sequences <= min(bucket, self.most_sequences):
                return self._shape(bucket, bound), True
        # Exact rows, but everything Triton compiles for is padded alike.
        return StepShape(rows, self.most_sequences, self._pages(bound)), False

    def _shape(self, rows: int, context: int) -> StepShape:
        return StepShape(rows, min(rows, self.most_sequences), self._pages(context))

    def _pages(self, context: int) -> int:
        return -(-context // self.page_tokens)
