"""The predicted seconds of a step."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class StepSize(NamedTuple):
    """The size of a step.

    Attributes:
        tokens: number of computed tokens, including drafts.
        kv_tokens: number of KV tokens that the step reads.
        sequences: number of sequences in the batch.
        pairs: number of pairs of a computed token, except the first of its sequence, and a KV token
            that it attends to.
        sampled: number of computed tokens after which a token is sampled: decodes, draft slots and
            the last token of a prompt.
    """

    tokens: int
    kv_tokens: int
    sequences: int
    pairs: int
    sampled: int = 0


@dataclass(slots=True, unsafe_hash=True)
class StepCost:
    """Predicted seconds of one forward pass: a staircase over tokens plus linear terms.

    `T = table(tokens) + kv_token_s * kv_tokens + sequence_s * sequences + pair_s * pairs
    + sample_s * sampled`. Tokens that fit into a bucket (a CUDA graph, a tile of padded rows) are
    free, so the table is a staircase. It continues beyond the last bucket with the slope of the
    last stair.

    Attributes:
        token_buckets: ascending token counts, not empty.
        step_s: seconds of a step of each bucket, never falling.
        kv_token_s: seconds per KV token read.
        sequence_s: seconds per sequence of the batch.
        pair_s: seconds per pair (`StepSize.pairs`), because each token multiplies the KV that a
            sequence reads once. 0 if reading hides that time.
        sample_s: seconds per sampled token: its logits over the vocabulary, and the choice of the
            token. Draft slots need them, and prompt tokens do not.

    Raises:
        ValueError: the table is empty, not ascending, falling, or of unequal lengths.
    """

    token_buckets: tuple[int, ...]
    step_s: tuple[float, ...]
    kv_token_s: float = 0.0
    sequence_s: float = 0.0
    pair_s: float = 0.0
    sample_s: float = 0.0
    _slope_s: float = field(init=False, repr=False, default=0.0)

    def __post_init__(self) -> None:
        """Check the table and compute the slope beyond it."""
        buckets, steps = self.token_buckets, self.step_s
        if not buckets or len(buckets) != len(steps):
            raise ValueError("token_buckets and step_s must be of equal length, at least 1")
        if any(b <= a for a, b in pairwise((0, *buckets))):
            raise ValueError("token_buckets must ascend from 1 or more")
        if any(b < a for a, b in pairwise((0.0, *steps))):
            raise ValueError("step_s must be non-negative and must not fall")
        before_s = steps[-2] if len(steps) > 1 else 0.0
        slope_s = (steps[-1] - before_s) / self._last_width
        self._slope_s = slope_s

    def seconds(self, tokens: int, kv_tokens: int = 0, sequences: int = 0, slots: int = 0) -> float:
        """Return the predicted seconds of a step.

        Every sequence samples a token. Only the first chunks of a long prompt do not.

        Args:
            slots: number of draft tokens among the tokens. Each attends to the mean number of KV
                tokens per sequence.
        """
        # Every step needs several predictions, so this method calls no others without need.
        index = bisect_left(self.token_buckets, tokens)
        known = index < len(self.token_buckets)
        seconds = self.step_s[index] if known else self._table_s(tokens)
        seconds += self.kv_token_s * kv_tokens + (self.sequence_s + self.sample_s) * sequences
        return seconds + slots * self.slot_s(kv_tokens, sequences) if slots else seconds

    def slot_s(self, kv_tokens: int, sequences: int) -> float:
        """Return the seconds of a draft slot in addition to those of the table."""
        pairs = kv_tokens / sequences if sequences else 0.0
        return self.pair_s * pairs + self.sample_s

    def size_s(self, size: StepSize) -> float:
        """Return the predicted seconds of a step of this size."""
        tokens, kv_tokens, sequences, pairs, sampled = size
        sampled_s = self.sample_s * (sampled - sequences)
        linear_s = self._linear_s(kv_tokens, sequences) + sampled_s
        return self._table_s(tokens) + linear_s + self.pair_s * pairs

    def _linear_s(self, kv_tokens: int, sequences: int) -> float:
        return self.kv_token_s * kv_tokens + (self.sequence_s + self.sample_s) * sequences

    def slots_s(
        self, tokens: int, kv_tokens: int, sequences: int, most_slots: int
    ) -> NDArray[np.float64]:
        """Return the predicted seconds of a step with 0 to `most_slots` draft slots.

        Args:
            tokens: number of tokens without drafts.

        Returns:
            `seconds(tokens + n, kv_tokens, sequences, n)` for each n, [most_slots + 1].
        """
        # Each stair covers the slot counts up to the count that fills it.
        ends = np.array((tokens - 1, *self.token_buckets)) - tokens
        ends = np.minimum(np.maximum(ends, -1), most_slots)
        beyond = np.arange(ends[-1] + 1, most_slots + 1) + (tokens - self.token_buckets[-1])
        seconds = np.concatenate(
            (
                np.repeat(self.step_s, ends[1:] - ends[:-1]),
                self.step_s[-1] + self._slope_s * beyond,
            )
        )
        seconds += self._linear_s(kv_tokens, sequences)
        slot_s = self.slot_s(kv_tokens, sequences)
        if slot_s:
            seconds += slot_s * np.arange(most_slots + 1)
        return seconds

    def few_slots_s(
        self, tokens: int, kv_tokens: int, sequences: int, most_slots: int
    ) -> list[float]:
        """Return the values of `slots_s` up to rounding, faster for a few dozen slots."""
        linear_s = self._linear_s(kv_tokens, sequences)
        slot_s = self.slot_s(kv_tokens, sequences)
        buckets, steps = self.token_buckets, self.step_s
        seconds: list[float] = []
        for place in range(bisect_left(buckets, tokens), len(buckets)):
            if len(seconds) > most_slots:
                return seconds
            flat_s = steps[place] + linear_s
            end = min(buckets[place] - tokens, most_slots) + 1
            seconds += [flat_s + slot_s * slots for slots in range(len(seconds), end)]
        for slots in range(len(seconds), most_slots + 1):
            stair_s = steps[-1] + self._slope_s * (tokens + slots - buckets[-1])
            seconds.append(stair_s + linear_s + slot_s * slots)
        return seconds

    def edges_up_to(self, tokens: int) -> list[int]:
        """Return the ends of the stairs up to a token count.

        Beyond the table, stairs have the width of the last stair.
        """
        last = self.token_buckets[-1]
        beyond = range(last + self._last_width, tokens + 1, self._last_width)
        return [bucket for bucket in self.token_buckets if bucket <= tokens] + list(beyond)

    def least_token_s(self, tokens: int, most: int, once_s: float = 0.0) -> float:
        """Return the smallest mean seconds per token of 1 to `most` more tokens.

        The minimum is at the end of a stair.

        Args:
            once_s: additional seconds that all of these tokens share.
        """
        base_s = self._table_s(tokens) - once_s
        least_s = (self._table_s(tokens + most) - base_s) / most
        first = bisect_right(self.token_buckets, tokens)
        last = bisect_left(self.token_buckets, tokens + most)
        for place in range(first, last):
            end_s = (self.step_s[place] - base_s) / (self.token_buckets[place] - tokens)
            least_s = min(least_s, end_s)
        return least_s

    def next_edge(self, tokens: int) -> int:
        """Return the largest token count on the next stair above `tokens`.

        The table continues with one more stair of the last width. Beyond it, every token is a
        stair.
        """
        base_s = self._table_s(tokens)
        higher = bisect_right(self.step_s, base_s)
        if higher < len(self.step_s):
            return self.token_buckets[bisect_right(self.step_s, self.step_s[higher]) - 1]
        last = self.token_buckets[-1]
        return tokens + 1 if tokens >= last else last + self._last_width

    @property
    def _last_width(self) -> int:
        return self.token_buckets[-1] - (self.token_buckets[-2:-1] or (0,))[0]

    def _table_s(self, tokens: int) -> float:
        index = bisect_left(self.token_buckets, tokens)
        if index < len(self.token_buckets):
            return self.step_s[index]
        return self.step_s[-1] + self._slope_s * (tokens - self.token_buckets[-1])
