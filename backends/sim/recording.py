"""Recordings of what every proposer would have drafted at each position of real texts.

The text of a request does not depend on its drafts, so a recording replays any policy. Two are
shipped: `draftgate-demo`, made by `bench.engine.acceptance` from held-out texts of the shipped
model, and `llama-3.1-8b`, from the texts of "Speculative Decoding: Performance or Illusion?" (arXiv
2601.11580). A file has the form `acceptance/2`, or the older `acceptance/1`, and may be compressed
(`.gz`).
"""

from __future__ import annotations

import gzip
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Final, Literal, NamedTuple

import msgspec

RECORDINGS: Final = Path(__file__).parent / "recordings"

DIGITS: Final = "0123456789abcdefg"
"""Encodes a length of 0 to 16 tokens as one character."""

LENGTHS: Final = {digit: length for length, digit in enumerate(DIGITS)}


class Guess(NamedTuple):
    """A proposer's draft for a position.

    Attributes:
        evidence, agreement: as in `backends.core.drafts.Draft`.
        proposed: number of tokens; 0 if it has no proposal.
        agreed: number of tokens, counted from the first, that are right.
    """

    evidence: int
    agreement: int
    proposed: int
    agreed: int


NO_GUESS: Final = Guess(0, 0, 0, 0)


class Columns(msgspec.Struct, frozen=True, omit_defaults=True):
    """One proposer's drafts for a text, by position; see `Guess`.

    An empty `agreement` is 0 everywhere. `proposed` and `agreed` hold one of `DIGITS` each.
    """

    evidence: tuple[int, ...]
    proposed: str
    agreed: str
    agreement: tuple[int, ...] = ()

    @classmethod
    def of(cls, guesses: Sequence[Guess]) -> Columns:
        """Return the columns of one guess per position.

        Raises:
            IndexError: a draft is longer than 16 tokens.
        """
        agreement = tuple(guess.agreement for guess in guesses)
        return cls(
            tuple(guess.evidence for guess in guesses),
            "".join(DIGITS[guess.proposed] for guess in guesses),
            "".join(DIGITS[guess.agreed] for guess in guesses),
            agreement if any(agreement) else (),
        )


class Text(msgspec.Struct, frozen=True, omit_defaults=True):
    """A recorded text.

    Attributes:
        prompt: index of its prompt in the source.
        drafts: the drafts of each proposer.
        held_out: whether no constant of the product was chosen with this text.
    """

    task: str
    temperature: float
    prompt: int
    drafts: dict[str, Columns]
    held_out: bool = False

    @property
    def length(self) -> int:
        """Number of recorded positions."""
        return len(next(iter(self.drafts.values())).evidence)

    def guess(self, proposer: str, position: int) -> Guess:
        """Return a proposer's draft for a position, or `NO_GUESS` if it was not recorded."""
        columns = self.drafts.get(proposer)
        if columns is None:
            return NO_GUESS
        return Guess(
            columns.evidence[position],
            columns.agreement[position] if columns.agreement else 0,
            LENGTHS[columns.proposed[position]],
            LENGTHS[columns.agreed[position]],
        )

    def check(self) -> None:
        """Check the columns.

        Raises:
            ValueError: there are none, they differ in length, or a length is not one of `DIGITS`.
        """
        columns = self.drafts.values()
        lengths = {len(c) for one in columns for c in (one.evidence, one.proposed, one.agreed)}
        lengths.update(len(one.agreement) for one in columns if one.agreement)
        if len(lengths) != 1:
            raise ValueError(f"columns of {self.task} {self.prompt} differ in length")
        if unknown := {*"".join(one.proposed + one.agreed for one in columns)} - LENGTHS.keys():
            raise ValueError(f"{self.task} {self.prompt} has lengths {sorted(unknown)}")


class RecordingFile(msgspec.Struct, frozen=True, kw_only=True):
    """A recording as the file has it.

    Attributes:
        source: how it was made.
        slots: longest recorded draft.
        classes: the task whose texts a class of requests replays. `*` stands for classes that are
            neither named here nor the name of a task.
    """

    format: Literal["acceptance/1", "acceptance/2"] = "acceptance/1"
    source: str
    slots: int
    classes: dict[str, str] = {}
    texts: tuple[Text, ...]

    def encode(self) -> bytes:
        """Return the content of a JSON file with one text per line."""
        head = msgspec.json.encode(msgspec.structs.replace(self, texts=()))
        lines = b",\n".join(map(msgspec.json.encode, self.texts))
        return head.removesuffix(b"]}") + b"\n" + lines + b"\n]}\n"


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

    def held_out(self) -> Recording:
        """Return the recording of the texts with which no constant was chosen.

        If the recording marks none, it is returned whole.
        """
        texts = tuple(text for text in self._file.texts if text.held_out)
        return self if not texts else Recording(msgspec.structs.replace(self._file, texts=texts))

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
        content = path.read_bytes()
        if path.suffix == ".gz":
            content = gzip.decompress(content)
        return Recording(msgspec.json.decode(content, type=RecordingFile))
    except FileNotFoundError as error:
        known = ", ".join(recording_names())
        raise ValueError(
            f"no recording {name_or_file!r}: expected the path of a file or one of {known}"
        ) from error
    except OSError as error:
        raise ValueError(f"cannot read recording {path}: {error.strerror}") from error
    except (EOFError, KeyError, ValueError, msgspec.MsgspecError) as error:
        raise ValueError(f"damaged recording {path}: {error}") from error


def _name(path: Path) -> str:
    return path.name.partition(".json")[0]


def _nearest(temperatures: Iterable[float], wanted: float) -> float:
    return min(temperatures, key=lambda temperature: abs(temperature - wanted))
