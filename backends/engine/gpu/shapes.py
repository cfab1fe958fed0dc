"""The few shapes of GPU steps, each captured in a CUDA graph at startup."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from typing import Final

from draftgate.backends.engine.gpu.layout import StepShape

ROW_BUCKETS: Final[tuple[int, ...]] = (
    1,
    2,
    4,
    *range(8, 64, 8),
    *range(64, 128, 16),
    *range(128, 513, 32),
)
"""Rows of captured steps.

A step of up to 184 rows takes the time to read the bfloat16 weights (790 TFLOP/s over 4.3 TB/s, an
H200's data sheet), so padding is nearly free. Up to about 400 rows of an 8B model (8 ms), the host
takes longer to launch the kernels of a step than the GPU to run them (300 launches of 20 to 30 us).
A graph of 512 rows also contains the drafts of 64 sequences with 7 tokens each. Longer steps hide
their launches and run without a graph. The padding is at most 31 rows, 0.6 ms of products. These
numbers are estimates (2026-11-27), not measured.
"""

CONTEXT_FACTOR: Final = 4
FIRST_CONTEXT: Final = 2048
"""Smallest bound on the context of captured steps, in slots.

Each further bound is `CONTEXT_FACTOR` times the previous bound.

The grid of attention covers the bound, and each wave of empty programs costs a few microseconds
(`paged_attention`). With a factor of 4, at most three quarters of the programs are empty. The
factor is not measured.
"""


def row_bucket(rows: int) -> int:
    """Return the captured rows of a step of this number of rows, or the most captured rows."""
    return next((bucket for bucket in ROW_BUCKETS if bucket >= rows), ROW_BUCKETS[-1])


@dataclass(frozen=True)
class Shapes:
    """The shapes of a model's steps.

    Attributes:
        max_rows: maximum rows of a captured step. 0 captures no step.
        max_sequences: maximum sequences of any step.
        max_context: slots of the longest context.
        page_tokens: slots of a page.
    """

    max_rows: int
    max_sequences: int
    max_context: int
    page_tokens: int

    @cached_property
    def row_buckets(self) -> tuple[int, ...]:
        """Rows of captured steps, ascending."""
        return tuple(takewhile(lambda rows: rows <= self.max_rows, ROW_BUCKETS))

    @cached_property
    def contexts(self) -> tuple[int, ...]:
        """Bounds on the longest context of a step, ascending. The last bound fits every context."""
        bounds = [FIRST_CONTEXT]
        while bounds[-1] < self.max_context:
            bounds.append(bounds[-1] * CONTEXT_FACTOR)
        return tuple(bounds)

    def captured(self) -> Iterator[StepShape]:
        """Yield the shapes to capture, largest first, so that smaller shapes reuse memory."""
        for rows in reversed(self.row_buckets):
            for context in reversed(self.contexts):
                yield self._shape(rows, context)

    def shape(self, rows: int, sequences: int, context: int) -> tuple[StepShape, bool]:
        """Return the shape for a step, and whether that shape is captured.

        Args:
            rows: number of tokens, at least 1.
            sequences: number of sequences, at most `max_sequences`.
            context: slots of the longest context.
        """
        bound = next(bound for bound in self.contexts if bound >= context)
        for bucket in self.row_buckets:
            if rows <= bucket and sequences <= min(bucket, self.max_sequences):
                return self._shape(bucket, bound), True
        # Keep the exact rows, but pad the sizes that Triton specialises for as in captured steps.
        return StepShape(rows, self.max_sequences, self._pages(bound)), False

    def _shape(self, rows: int, context: int) -> StepShape:
        return StepShape(rows, min(rows, self.max_sequences), self._pages(context))

    def _pages(self, context: int) -> int:
        return -(-context // self.page_tokens)
