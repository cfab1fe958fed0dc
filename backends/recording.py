"""The form `acceptance/2` of recordings: what proposers would draft at each position of texts.

`serve --record-acceptance` and `bench.engine.acceptance` write recordings, and the simulator
replays them. A recording contains no tokens and no text.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final, Literal

import msgspec
from msgspec import UNSET, UnsetType

from draftgate.backends.core.drafts import ROOT, Draft
from draftgate.backends.recorded_run import Call, RecordedWorker
from draftgate.policies.values import immutable, replace

SLOTS: Final = 16
"""Length of the longest recorded draft, which is the longest that `auto` plans."""

DIGITS: Final = "0123456789abcdefg"
"""Encodes a length of 0 to 16 tokens as one character."""

_LENGTHS: Final = {digit: length for length, digit in enumerate(DIGITS)}


class Tree(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """The shape of a draft with branches; see `core.drafts.Draft`.

    Attributes:
        parents: the parent of each token, as one of `DIGITS`: 0 for the root, and i + 1 for the
            token with the index i.
        shares: pairs of an index and a share, for the tokens whose share is not 1 (`Draft.shares`).
    """

    parents: str
    shares: tuple[tuple[int, float], ...] = ()

    @classmethod
    def from_draft(cls, draft: Draft) -> Tree | None:
        """Return the shape of a draft, or None for a chain."""
        parents = "".join(DIGITS[parent + 1] for parent in draft.parents)
        shares = tuple(pair for pair in enumerate(draft.shares) if pair[1] != 1.0)
        return None if DIGITS.startswith(parents) and not shares else cls(parents, shares)

    def parent_places(self) -> tuple[int, ...]:
        """Return the index of each token's parent, or `ROOT`, as in `Draft`."""
        return tuple(_LENGTHS[digit] - 1 for digit in self.parents)

    def all_shares(self) -> tuple[float, ...]:
        """Return the share of each token, as in `Draft`."""
        known = dict(self.shares)
        return tuple(known.get(place, 1.0) for place in range(len(self.parents)))

    def path_to(self, place: int) -> tuple[int, ...]:
        """Return the indices of a token and its ancestors, from the root down."""
        parents, path = self.parent_places(), []
        while place != ROOT:
            path.append(place)
            place = parents[place]
        return tuple(reversed(path))

    def check(self) -> None:
        """Check the shape.

        Raises:
            ValueError: a parent is unknown or follows its child, or a share has no token.
        """
        places = [_LENGTHS.get(digit, SLOTS + 1) - 1 for digit in self.parents]
        if any(parent >= place for place, parent in enumerate(places)):
            raise ValueError(f"the tree {self.parents!r} has a parent that follows its child")
        if not all(0 <= place < len(places) for place, _ in self.shares):
            raise ValueError(f"the tree {self.parents!r} has shares of other tokens")


@immutable
class Guess:
    """A proposer's draft for a position.

    Attributes:
        evidence, agreement: as in `backends.core.drafts.Draft`.
        proposed: number of tokens; 0 if it has no proposal.
        agreed: number of tokens, counted from the first, that are right. In a tree, these tokens
            form a path from the root.
        tree: shape of a draft with branches, or None for a chain.
        path: indices of the right tokens in a tree, and empty for a chain.
    """

    evidence: int
    agreement: int
    proposed: int
    agreed: int
    tree: Tree | None = None
    path: tuple[int, ...] = ()

    @classmethod
    def from_draft(cls, draft: Draft, tokens: Sequence[int]) -> Guess:
        """Return the guess of a draft that these tokens followed."""
        path, tree = draft.accepted_places(tokens), Tree.from_draft(draft)
        kept = () if tree is None else path
        return cls(draft.evidence, draft.agreement, len(draft), len(path), tree, kept)

    def first(self, tokens: int) -> Guess:
        """Return the guess of the first `tokens` tokens of the draft. The tree stays whole."""
        if tokens >= self.proposed:
            return self
        if self.tree is None:
            return Guess(self.evidence, self.agreement, tokens, min(tokens, self.agreed))
        path = tuple(place for place in self.path if place < tokens)
        return replace(self, proposed=tokens, agreed=len(path), path=path)

    @property
    def right_places(self) -> tuple[int, ...]:
        """Indices of the right tokens, from the root down."""
        return tuple(range(self.agreed)) if self.tree is None else self.path


NO_GUESS: Final = Guess(0, 0, 0, 0)


class Columns(msgspec.Struct, frozen=True, omit_defaults=True):
    """One proposer's drafts for a text, by position; see `Guess`.

    Attributes:
        evidence: a number for each position.
        proposed: one of `DIGITS` for each position.
        agreed: one of `DIGITS` for each position. For a tree, this is the index of the last right
            token plus 1, which determines the whole path.
        agreement: a number for each position, or empty if all are 0.
        tree: 0 for a chain, or the index in `trees` plus 1. Empty if all drafts are chains.
        trees: the different shapes of the drafts with branches.
    """

    evidence: tuple[int, ...]
    proposed: str
    agreed: str
    agreement: tuple[int, ...] = ()
    tree: tuple[int, ...] = ()
    trees: tuple[Tree, ...] = ()

    @classmethod
    def from_guesses(cls, guesses: Sequence[Guess]) -> Columns:
        """Return the columns of one guess per position.

        Raises:
            IndexError: a draft is longer than `SLOTS` tokens.
        """
        agreement = tuple(guess.agreement for guess in guesses)
        trees = dict.fromkeys(guess.tree for guess in guesses if guess.tree is not None)
        number = {None: 0} | {tree: index for index, tree in enumerate(trees, 1)}
        return cls(
            tuple(guess.evidence for guess in guesses),
            "".join(DIGITS[guess.proposed] for guess in guesses),
            "".join(DIGITS[_last_right(guess)] for guess in guesses),
            agreement if any(agreement) else (),
            tuple(number[guess.tree] for guess in guesses) if trees else (),
            tuple(trees),
        )

    def guess(self, position: int) -> Guess:
        """Return the draft for a position."""
        evidence, agreed = self.evidence[position], _LENGTHS[self.agreed[position]]
        agreement = self.agreement[position] if self.agreement else 0
        proposed = _LENGTHS[self.proposed[position]]
        number = self.tree[position] if self.tree else 0
        if not number:
            return Guess(evidence, agreement, proposed, agreed)
        tree = self.trees[number - 1]
        path = tree.path_to(agreed - 1)
        return Guess(evidence, agreement, proposed, len(path), tree, path)

    def check(self) -> None:
        """Check the drafts.

        Raises:
            ValueError: a draft has more right tokens than tokens, a shape is invalid, or a position
                names no shape of its draft's length.
        """
        for proposed, agreed in set(zip(self.proposed, self.agreed, strict=True)):
            if _LENGTHS[agreed] > _LENGTHS[proposed]:
                raise ValueError("a position has more right tokens than its draft")
        for tree in self.trees:
            tree.check()
        for position, number in enumerate(self.tree):
            length = _LENGTHS[self.proposed[position]]
            known = 0 <= number <= len(self.trees)
            if not known or (number and len(self.trees[number - 1].parents) != length):
                raise ValueError(f"position {position} has no tree {number} of {length} tokens")


class Text(msgspec.Struct, frozen=True, omit_defaults=True):
    """A recorded text.

    Attributes:
        prompt: index of its prompt in the source, or of the text if it was recorded while serving.
        drafts: the drafts of each proposer.
        tenant: the tenant of the request, if the operator chose to record tenants.
        held_out: whether no constant of the product was chosen with this text.
    """

    task: str
    temperature: float
    prompt: int
    drafts: dict[str, Columns]
    held_out: bool = False
    tenant: str = ""

    @property
    def length(self) -> int:
        """Number of recorded positions."""
        return len(next(iter(self.drafts.values())).evidence)

    def guess(self, proposer: str, position: int) -> Guess:
        """Return a proposer's draft for a position, or `NO_GUESS` if it was not recorded."""
        columns = self.drafts.get(proposer)
        return NO_GUESS if columns is None else columns.guess(position)

    def check(self) -> None:
        """Check the columns.

        Raises:
            ValueError: there are none, they differ in length, a length is not one of `DIGITS`, or a
                draft is damaged (`Columns.check`).
        """
        columns = self.drafts.values()
        lengths = {len(c) for one in columns for c in (one.evidence, one.proposed, one.agreed)}
        optional = [part for one in columns for part in (one.agreement, one.tree) if part]
        lengths.update(map(len, optional))
        if len(lengths) != 1:
            raise ValueError(f"columns of {self.task} {self.prompt} differ in length")
        if unknown := {*"".join(one.proposed + one.agreed for one in columns)} - _LENGTHS.keys():
            raise ValueError(f"{self.task} {self.prompt} has lengths {sorted(unknown)}")
        for one in columns:
            one.check()


class RecordingFile(msgspec.Struct, frozen=True, kw_only=True):
    """A recording as the file has it.

    Attributes:
        source: how it was made.
        slots: longest recorded draft.
        classes: the task whose texts a class of requests replays. `*` stands for classes that are
            neither named here nor the name of a task.
        worker: the worker at the start of the recorded run, if the run is recorded.
        gap: why the run cannot be replayed, if a worker recorded it only in part.
        calls: calls of the worker's scheduler, in order.
    """

    format: Literal["acceptance/1", "acceptance/2"] = "acceptance/1"
    source: str
    slots: int
    classes: dict[str, str] = {}
    worker: RecordedWorker | UnsetType = UNSET
    gap: str | UnsetType = UNSET
    texts: tuple[Text, ...]
    calls: tuple[Call, ...] | UnsetType = UNSET

    def encode(self) -> bytes:
        """Return the content of a JSON file with one text or call per line."""
        calls = () if self.calls is UNSET else self.calls
        encode = msgspec.json.encode
        return b"".join(self.lines(map(encode, self.texts), map(encode, calls)))

    def lines(self, texts: Iterable[bytes], calls: Iterable[bytes] = ()) -> Iterator[bytes]:
        """Yield the content of the file with these encoded parts in place of its own.

        The file has calls if it has a worker.
        """
        head = msgspec.json.encode(msgspec.structs.replace(self, texts=(), calls=UNSET))
        yield head.removesuffix(b"]}")
        yield from _array(texts)
        if self.worker is not UNSET:
            yield b'],"calls":['
            yield from _array(calls)
        yield b"]}\n"


def _array(items: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the encoded items of an array, one per line."""
    separator = b"\n"
    for item in items:
        yield separator + item
        separator = b",\n"
    yield b"\n"


def read_recording(path: Path) -> RecordingFile:
    """Read a recording, which is compressed if its name ends with `.gz`.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: the file cannot be read or is damaged. The message names it.
    """
    try:
        content = path.read_bytes()
        if path.suffix == ".gz":
            content = gzip.decompress(content)
        return msgspec.json.decode(content, type=RecordingFile)
    except FileNotFoundError:
        raise
    except (EOFError, gzip.BadGzipFile, zlib.error, ValueError) as error:
        raise ValueError(f"damaged recording {path}: {error}") from error
    except OSError as error:
        raise ValueError(f"cannot read recording {path}: {error.strerror}") from error


def _last_right(guess: Guess) -> int:
    """Return the index of the last right token plus 1, or 0 without a right token."""
    return guess.right_places[-1] + 1 if guess.right_places else 0
