"""Recorded acceptance: what proposers would have drafted at each position of real texts.

A file of the form `acceptance/1`, made by `bench.engine.acceptance` from held-out texts of
the shipped model. Neighbouring positions of one text go together (where a text repeats itself,
drafts are right again and again), so acceptance that is replayed is autocorrelated as the real one
is; drawn at random, drafts would pay more (speculation.md: the iid formula over-predicts).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

import msgspec

SHIPPED: Final = Path(__file__).parent / "recordings" / "shipped.json"

DIGITS: Final = {digit: length for length, digit in enumerate("0123456789abcdefg")}
"""A length of 0 to 16 tokens in one character."""


class _Columns(msgspec.Struct, frozen=True):
    evidence: tuple[int, ...]
    proposed: str
    agreed: str


class _Text(msgspec.Struct, frozen=True):
    task: str
    temperature: float
    prompt: int
    drafts: dict[str, _Columns]


class _File(msgspec.Struct, frozen=True):
    source: str
    slots: int
    texts: tuple[_Text, ...]


@dataclass(frozen=True, slots=True)
class Drafts:
    """What one proposer said to one text, by position.

    Attributes:
        evidence: the proposer's, on its own scale.
        proposed: tokens it drafted when asked for as many as were recorded.
        agreed: how many of these, from the first on, were those that came.
    """

    evidence: tuple[int, ...]
    proposed: tuple[int, ...]
    agreed: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Text:
    """A recorded text: its drafts by proposer, at as many positions."""

    length: int
    drafts: dict[str, Drafts]


class Recording:
    """Recorded texts by task and temperature.

    Attributes:
        source: how it was made.
        proposers: whose drafts are in it.
    """

    def __init__(self, file: Any) -> None:
        """Take a file's content apart.

        Raises:
            ValueError: columns of a text differ in length, or there are no texts.
        """
        self.source: str = file.source
        self._texts: dict[str, dict[float, list[Text]]] = {}
        for text in file.texts:
            drafts = {name: _drafts(columns) for name, columns in text.drafts.items()}
            lengths = {len(c) for d in drafts.values() for c in (d.evidence, d.proposed, d.agreed)}
            if len(lengths) != 1:
                raise ValueError(f"columns of {text.task} {text.prompt} differ in length")
            of_task = self._texts.setdefault(text.task, {})
            of_task.setdefault(text.temperature, []).append(Text(lengths.pop(), drafts))
        if not self._texts:
            raise ValueError("a recording without texts")
        self.proposers: tuple[str, ...] = tuple(sorted({p for t in file.texts for p in t.drafts}))

    @property
    def tasks(self) -> tuple[str, ...]:
        """What was recorded."""
        return tuple(self._texts)

    def texts(self, task: str, temperature: float) -> list[Text]:
        """Return the texts of a task, of the recorded temperature that is nearest.

        Raises:
            ValueError: there is no such task.
        """
        if task not in self._texts:
            raise ValueError(f"no task {task!r} was recorded; there are {', '.join(self._texts)}")
        at = self._texts[task]
        return at[min(at, key=lambda recorded: abs(recorded - temperature))]


def _drafts(columns: _Columns) -> Drafts:
    proposed, agreed = (tuple(DIGITS[d] for d in c) for c in (columns.proposed, columns.agreed))
    return Drafts(columns.evidence, proposed, agreed)


@cache
def load_recording(path: Path = SHIPPED) -> Recording:
    """Read a recording; the shipped one if none is named.

    Raises:
        OSError: it cannot be read.
        ValueError: it does not have the form of `acceptance/1`.
    """
    try:
        return Recording(msgspec.json.decode(path.read_bytes(), type=_File))
    except (KeyError, ValueError, msgspec.MsgspecError) as error:
        raise ValueError(f"damaged recording {path}: {error}") from error
