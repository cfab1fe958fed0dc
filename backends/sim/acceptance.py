"""The acceptance of simulated drafts, with a constant probability or as recorded.

A recording holds the drafts of every proposer for each position of real texts. Its format is
`acceptance/1`, and `bench.engine.acceptance` makes it from held-out texts of the shipped model. If
a text repeats itself, right drafts follow each other, so replayed acceptance is autocorrelated like
real acceptance. With independent draws, drafts would gain more than they do.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import takewhile
from pathlib import Path
from random import Random
from typing import Any, Final, NamedTuple, Protocol

import msgspec

from draftgate.backends.core.sequence import Sequence
from draftgate.backends.sim.tokens import SimulatedTokens

SHIPPED: Final = Path(__file__).parent / "recordings" / "shipped.json"

TASK_SEPARATOR: Final = "/"
"""Separator in a request id, after the name of the task whose recorded texts are replayed."""

DIGITS: Final = {digit: length for length, digit in enumerate("0123456789abcdefg")}
"""Encoding of a length of 0 to 16 tokens as one character."""


class Guess(NamedTuple):
    """A proposer's draft for a position.

    Attributes:
        evidence: evidence on the proposer's own scale.
        proposed: number of tokens, or 0 if the proposer has no proposal.
        agreed: number of leading tokens that are right.
    """

    evidence: int
    proposed: int
    agreed: int


class Acceptance(Protocol):
    """Knows which drafts will be accepted. A guess depends on its position alone."""

    def guess(self, proposer: str, sequence: Sequence, most: int) -> Guess:
        """Return the proposer's draft of up to `most` tokens after the sequence's last token."""
        ...

    def forget(self, sequence: Sequence) -> None:
        """Drop the state of the sequence. The call is idempotent."""
        ...


class ConstantAcceptance:
    """Accepts each token with the same probability, so lengths are geometrically distributed."""

    def __init__(self, tokens: SimulatedTokens, chance: float) -> None:
        """Take the random numbers of `tokens`.

        Raises:
            ValueError: the chance is not a probability.
        """
        if not 0.0 <= chance <= 1.0:
            raise ValueError(f"sim_acceptance must be between 0 and 1, not {chance}")
        self._tokens = tokens
        self._chance = chance

    def guess(self, proposer: str, sequence: Sequence, most: int) -> Guess:
        """See `Acceptance`."""
        uniforms = self._tokens.uniforms(sequence, len(sequence.token_ids), most)
        agreed = sum(1 for _ in takewhile(lambda uniform: uniform < self._chance, uniforms))
        return Guess(1, most, agreed)

    def forget(self, sequence: Sequence) -> None:
        """Do nothing, because this acceptance has no state."""


class ReplayedAcceptance:
    """Replays a recorded text for each sequence, from a random position on and past its end.

    The text wraps around at its end. The request id begins with the task and `TASK_SEPARATOR`. The
    seed and the choice select the text and the position, so they are the same on every worker and
    under every policy.
    """

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._places: dict[int, tuple[Text, int]] = {}  # text and first position, by sequence key

    def guess(self, proposer: str, sequence: Sequence, most: int) -> Guess:
        """See `Acceptance`."""
        place = self._places.get(sequence.key)
        if place is None:
            place = self._places[sequence.key] = self._chosen(sequence)
        text, first = place
        drafts = text.drafts.get(proposer)
        if drafts is None:  # no recording with such texts exists
            return Guess(0, 0, 0)
        at = (first + sequence.output_tokens) % text.length
        proposed = min(most, drafts.proposed[at])
        return Guess(drafts.evidence[at], proposed, min(proposed, drafts.agreed[at]))

    def forget(self, sequence: Sequence) -> None:
        """See `Acceptance`."""
        self._places.pop(sequence.key, None)

    def _chosen(self, sequence: Sequence) -> tuple[Text, int]:
        request = sequence.request
        task = request.request_id.partition(TASK_SEPARATOR)[0]
        texts = self._recording.texts(task, request.sampling.temperature)
        random = Random(f"{request.sampling.seed}/{sequence.choice}")
        text = texts[random.randrange(len(texts))]
        return text, random.randrange(text.length)


class _ColumnsFile(msgspec.Struct, frozen=True):
    evidence: tuple[int, ...]
    proposed: str
    agreed: str


class _TextFile(msgspec.Struct, frozen=True):
    task: str
    temperature: float
    prompt: int
    drafts: dict[str, _ColumnsFile]


class _RecordingFile(msgspec.Struct, frozen=True):
    source: str
    slots: int
    texts: tuple[_TextFile, ...]


@dataclass(frozen=True, slots=True)
class RecordedDrafts:
    """The drafts of one proposer for one text, by position (`Guess`)."""

    evidence: tuple[int, ...]
    proposed: tuple[int, ...]
    agreed: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Text:
    """A recorded text, with its number of positions and the drafts of each proposer."""

    length: int
    drafts: dict[str, RecordedDrafts]


class Recording:
    """Recorded texts by task and temperature.

    Attributes:
        source: origin of the recording.
        proposers: proposers of the recorded drafts.
    """

    def __init__(self, file: Any) -> None:
        """Decode the content of a file.

        Raises:
            ValueError: the columns of a text differ in length, or the file has no texts.
        """
        self.source: str = file.source
        self._texts: dict[str, dict[float, list[Text]]] = {}
        for text in file.texts:
            drafts = {
                name: RecordedDrafts(
                    columns.evidence,
                    tuple(DIGITS[digit] for digit in columns.proposed),
                    tuple(DIGITS[digit] for digit in columns.agreed),
                )
                for name, columns in text.drafts.items()
            }
            lengths = {len(c) for d in drafts.values() for c in (d.evidence, d.proposed, d.agreed)}
            if len(lengths) != 1:
                raise ValueError(f"columns of {text.task} {text.prompt} differ in length")
            by_temperature = self._texts.setdefault(text.task, {})
            by_temperature.setdefault(text.temperature, []).append(Text(lengths.pop(), drafts))
        if not self._texts:
            raise ValueError("the recording has no texts")
        self.proposers: tuple[str, ...] = tuple(sorted({p for t in file.texts for p in t.drafts}))

    @property
    def tasks(self) -> tuple[str, ...]:
        """The recorded tasks."""
        return tuple(self._texts)

    def texts(self, task: str, temperature: float) -> list[Text]:
        """Return the texts of a task with the nearest recorded temperature.

        Raises:
            ValueError: the task does not exist.
        """
        if task not in self._texts:
            raise ValueError(f"no task {task!r} was recorded; expected {', '.join(self._texts)}")
        by_temperature = self._texts[task]
        return by_temperature[min(by_temperature, key=lambda one: abs(one - temperature))]


@cache
def load_recording(path: Path = SHIPPED) -> Recording:
    """Read a recording, by default the shipped recording.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is not a valid `acceptance/1` file.
    """
    try:
        return Recording(msgspec.json.decode(path.read_bytes(), type=_RecordingFile))
    except (KeyError, ValueError, msgspec.MsgspecError) as error:
        raise ValueError(f"damaged recording {path}: {error}") from error
