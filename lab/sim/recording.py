"""Recordings of what every proposer would have drafted at each position of real texts.

The text of a request does not depend on its drafts, so a recording replays any policy. The shipped
recordings have a card (`recordings/README.md`), and `bench.engine.acceptance` makes all of them but
`llama-3.1-8b`. A file has the form `acceptance/2`, or the older `acceptance/1`, and may be
compressed (`.gz`).
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from pathlib import Path
from random import Random
from typing import Final

import msgspec

from draftgate.backends.core.sequence import Sequence
from draftgate.backends.recording import Guess, RecordingFile, Text, read_recording

RECORDINGS: Final = Path(__file__).parent / "recordings"

CLASS_SEPARATOR: Final = "/"
"""Separator in a request id, after the name of the class whose recorded texts are replayed."""


class Recording:
    """Recorded texts by task and temperature.

    Attributes:
        source: how it was made.
        proposers: the proposers whose drafts it holds.
        classes: the classes of requests that have a task.
    """

    def __init__(self, file: RecordingFile) -> None:
        """Group the texts of a file.

        Raises:
            ValueError: a text is damaged (`Text.check`), or there are no texts.
        """
        self._file = file
        self.source = file.source
        self.proposers = tuple(sorted({name for text in file.texts for name in text.drafts}))
        self.classes = frozenset(file.classes)
        self._texts: dict[str, dict[float, list[Text]]] = {}
        for text in file.texts:
            text.check()
            by_temperature = self._texts.setdefault(text.task, {})
            by_temperature.setdefault(text.temperature, []).append(text)
        if not self._texts:
            raise ValueError("the recording has no texts")

    @property
    def tasks(self) -> tuple[str, ...]:
        """The recorded tasks."""
        return tuple(self._texts)

    @property
    def all_texts(self) -> tuple[Text, ...]:
        """The texts of all tasks and temperatures, in the order of the file."""
        return self._file.texts

    def held_out(self) -> Recording:
        """Return the recording of the texts with which no constant was chosen.

        If the recording marks none, it is returned whole.
        """
        texts = tuple(text for text in self._file.texts if text.held_out)
        return self if not texts else self._only(texts)

    def tuning(self) -> Recording:
        """Return the recording of the other texts, with which constants may be chosen."""
        return self._only(tuple(text for text in self._file.texts if not text.held_out))

    def replayed_by(self, class_name: str) -> Recording:
        """Return the recording of the texts that a class of requests replays."""
        tasks = {text.task for text in self.texts(class_name, 0.0)}
        return self._only(tuple(text for text in self._file.texts if text.task in tasks))

    def _only(self, texts: tuple[Text, ...]) -> Recording:
        return Recording(msgspec.structs.replace(self._file, texts=texts))

    def texts(self, class_name: str, temperature: float) -> list[Text]:
        """Return the texts that a class of requests replays.

        Args:
            class_name: a class or a task. If it is unknown, all texts are returned.
            temperature: of the request; the nearest recorded one of each task is used.
        """
        classes = self._file.classes
        task = classes.get(class_name, class_name)
        if task not in self._texts:
            task = classes.get("*", task)
        tasks = [self._texts[task]] if task in self._texts else self._texts.values()
        return [
            text
            for by_temperature in tasks
            for text in by_temperature[_nearest(by_temperature, temperature)]
        ]


def recording_names() -> tuple[str, ...]:
    """Return the names of the shipped recordings."""
    return tuple(sorted(map(_name, RECORDINGS.glob("*.json*"))))


@cache
def load_recording(name_or_file: str) -> Recording:
    """Read a shipped recording by name, or a file by its path.

    Raises:
        ValueError: the file is missing or damaged. The message names it and the error.
    """
    shipped = [path for path in RECORDINGS.glob("*.json*") if _name(path) == name_or_file]
    path = shipped[0] if shipped else Path(name_or_file)
    try:
        file = read_recording(path)
    except FileNotFoundError as error:
        known = ", ".join(recording_names())
        raise ValueError(
            f"no recording {name_or_file!r}: expected the path of a file or one of {known}"
        ) from error
    try:
        return Recording(file)
    except (KeyError, ValueError) as error:
        raise ValueError(f"damaged recording {path}: {error}") from error


def _name(path: Path) -> str:
    return path.name.partition(".json")[0]


def _nearest(temperatures: Iterable[float], wanted: float) -> float:
    return min(temperatures, key=lambda temperature: abs(temperature - wanted))


class ReplayedAcceptance:
    """Replays a recorded text for each sequence, from a random position on and past its end.

    If a text repeats itself, right drafts follow each other, so replayed acceptance is
    autocorrelated like real acceptance. With independent draws, drafts would gain more than they
    do.

    The text wraps around at its end. The request id begins with the class and `CLASS_SEPARATOR`.
    The seed and the choice select the text and the position, so they are the same on every worker
    and under every policy.
    """

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        # Text, its length and the first position, by sequence key.
        self._places: dict[int, tuple[Text, int, int]] = {}

    def guess(self, proposer: str, sequence: Sequence, most: int) -> Guess:
        """See `Acceptance`."""
        place = self._places.get(sequence.key)
        if place is None:
            place = self._places[sequence.key] = self._chosen(sequence)
        text, length, first = place
        return text.guess(proposer, (first + sequence.output_tokens) % length).first(most)

    def forget(self, sequence: Sequence) -> None:
        """See `Acceptance`."""
        self._places.pop(sequence.key, None)

    def _chosen(self, sequence: Sequence) -> tuple[Text, int, int]:
        request = sequence.request
        class_name = request.request_id.partition(CLASS_SEPARATOR)[0]
        texts = self._recording.texts(class_name, request.sampling.temperature)
        random = Random(f"{request.sampling.seed}/{sequence.choice}")
        text = texts[random.randrange(len(texts))]
        return text, text.length, random.randrange(text.length)
