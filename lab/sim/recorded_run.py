"""The run of a worker from a recording: its requests, texts and drafts for a simulation.

The tokens of a replayed text name its KV blocks. Two requests share exactly the blocks that they
shared in the live run, so the prefix cache finds the same blocks.
"""

from __future__ import annotations

from collections.abc import Container
from functools import cached_property
from pathlib import Path
from typing import Final

from msgspec import UNSET

from draftgate.backends.core.sequence import Sequence
from draftgate.backends.recorded_run import (
    Applied,
    Arrived,
    Ended,
    Evicted,
    RecordedRequest,
    seconds_at,
)
from draftgate.backends.recording import NO_GUESS, Guess, RecordingFile, Text, read_recording
from draftgate.backends.token_ids import TokenIds, compact
from draftgate.lab.sim.recording import CLASS_SEPARATOR

EOS: Final = 1
"""The token that ends a text."""

_DIGITS: Final = 4
DIGIT_BASE: Final = 254
"""Digits of a KV block's number in its tokens, and number of their ids, from 2 on. Every block has
all digits, so different blocks differ. All vocabularies have these ids."""

_WRONG_TOKEN: Final = -2
"""A drafted token that is not accepted."""


class RecordedRun:
    """The run of a recording.

    Attributes:
        worker: the worker at the start of the run.
        calls: calls of its scheduler.
        texts: recorded texts, by number of the request. A request without output has no text.
        ends: ends of the requests, by number.
        stopped: numbers of the requests that ended with an end-of-sequence token.
    """

    def __init__(self, file: RecordingFile) -> None:
        """Read the run of a file.

        Raises:
            ValueError: the file has no run, the run cannot be replayed, or a text is damaged. The
                message says why.
        """
        if file.worker is UNSET or file.calls is UNSET:
            why = "it contains no arrivals and steps" if file.gap is UNSET else file.gap
            raise ValueError(f"cannot replay the run of this recording: {why}")
        self.worker = file.worker
        self.calls = file.calls
        first = self.worker.first_text
        self.texts: dict[int, Text] = {}
        for text in file.texts:
            text.check()
            if text.prompt >= first:
                self.texts[text.prompt - first] = text
        self.ends = {call.request: call for call in self.calls if isinstance(call, Ended)}
        self._blocks: dict[int, list[int]] = {}
        runs = (run for end in self.ends.values() for run in end.blocks)
        self._known_blocks = max((first + count for first, count in runs), default=0)
        self.stopped = frozenset(end.request for end in self.ends.values() if end.stopped)

    @cached_property
    def arrivals(self) -> tuple[Arrived, ...]:
        """The arrivals, by number of the request."""
        return tuple(call for call in self.calls if isinstance(call, Arrived))

    @cached_property
    def ended(self) -> frozenset[int]:
        """Requests whose texts are shorter than their limit, for whatever reason."""
        numbers = range(len(self.arrivals))
        return frozenset(n for n in numbers if self.length(n) < self.request(n).max_tokens)

    @property
    def evictions(self) -> list[tuple[int, int]]:
        """Operation and number of blocks of each eviction."""
        return [(c.operation, c.blocks) for c in self.calls if isinstance(c, Evicted)]

    @property
    def duration_s(self) -> float:
        """Seconds from the first call to the end of the last step."""
        return max((seconds_at(c.ticks) for c in self.calls if isinstance(c, Applied)), default=0.0)

    def request(self, number: int) -> RecordedRequest:
        """Return a request."""
        return self.arrivals[number].request

    def blocks(self, number: int) -> list[int]:
        """Return the numbers of a request's full KV blocks."""
        blocks = self._blocks.get(number)
        if blocks is None:
            runs = self.ends[number].blocks if number in self.ends else ()
            blocks = [first + at for first, count in runs for at in range(count)]
            self._blocks[number] = blocks
        return blocks

    def unknown_block(self, number: int) -> int:
        """Return the number of the blocks of a request that were never full."""
        return self._known_blocks + number

    def length(self, number: int) -> int:
        """Return the number of output tokens of a request."""
        end = self.ends.get(number)
        return 0 if end is None or number not in self.texts else end.output_tokens


def load_run(path: Path) -> RecordedRun:
    """Read the run of a recording.

    Raises:
        ValueError: the file is missing or damaged, or its run cannot be replayed.
    """
    try:
        file = read_recording(path)
    except FileNotFoundError as error:
        raise ValueError(f"no recording {path}: expected the path of a file") from error
    try:
        return RecordedRun(file)
    except (KeyError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from error


def request_id(class_name: str, number: int) -> str:
    """Return the id of a simulated request, from which its number is read."""
    return f"{class_name}{CLASS_SEPARATOR}{number}"


def number_of(sequence: Sequence) -> int:
    """Return the number of a sequence's request."""
    name = sequence.request.request_id.rpartition(CLASS_SEPARATOR)[2]
    return int(name.partition("-")[0])  # the gateway appends the index of the prompt


class RunAcceptance:
    """The recorded drafts of each request; see `acceptance.Acceptance`."""

    def __init__(self, run: RecordedRun) -> None:
        self._texts = run.texts

    def guess(self, proposer: str, sequence: Sequence, most: int) -> Guess:
        """See `Acceptance`."""
        text = self._texts.get(number_of(sequence))
        if text is None or sequence.output_tokens >= text.length:
            return NO_GUESS
        return text.guess(proposer, sequence.output_tokens).first(most)

    def forget(self, sequence: Sequence) -> None:
        """Do nothing, because this acceptance has no state."""


class RunTokens:
    """The token ids of replayed texts; see `tokens.TrueTokens`."""

    def __init__(self, run: RecordedRun, stopped: Container[int]) -> None:
        """Prepare the texts.

        Args:
            stopped: numbers of the requests that end with an end-of-sequence token.
        """
        self._run = run
        self._stopped = stopped

    def prompt_ids(self, number: int) -> TokenIds:
        """Return the prompt of a request."""
        return compact(self._ids(number, 0, self._run.request(number).prompt_tokens))

    def tokens(self, sequence: Sequence, position: int, count: int = 1) -> tuple[int, ...]:
        """See `TrueTokens`."""
        return tuple(self._ids(number_of(sequence), position, count))

    def draft(self, sequence: Sequence, position: int, right: int, count: int) -> tuple[int, ...]:
        """See `TrueTokens`."""
        return self.tokens(sequence, position, right) + (_WRONG_TOKEN,) * (count - right)

    def forget(self, sequence: Sequence) -> None:
        """Do nothing, because the tokens have no state."""

    def _ids(self, number: int, position: int, count: int) -> list[int]:
        size, blocks = self._run.worker.block_tokens, self._run.blocks(number)
        rest = self._run.unknown_block(number)
        ids = []
        for at in range(position, position + count):
            block = blocks[at // size] if at // size < len(blocks) else rest
            ids.append(2 + block // DIGIT_BASE ** (at % _DIGITS) % DIGIT_BASE)
        prompt_tokens = self._run.request(number).prompt_tokens
        last = prompt_tokens + self._run.length(number) - 1 - position
        if 0 <= last < count and number in self._stopped:
            ids[last] = EOS
        return ids
