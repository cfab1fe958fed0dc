"""Text for prompts: the standard library and its docstrings.

Every Python installation has these texts, so a load needs no data set and no network. A user's file
can replace the corpus. Documents are sorted by name, so one version of Python always gives one
corpus, whatever packages are installed. Two Python versions give two corpora. The corpus reads a
text on first use and keeps it in memory (all texts take about 15 MB).
"""

from __future__ import annotations

import inspect
import os
import platform
import sysconfig
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from importlib.machinery import SourceFileLoader
from itertools import accumulate
from pathlib import Path
from random import Random
from types import CellType, CodeType, FunctionType
from typing import Final, NamedTuple

from draftgate.loadgen.planning.pairs import (
    TOPICS,
    Pair,
    file_pairs,
    installed_pairs,
)

SKIPPED_FOLDERS: Final = frozenset(
    {"__pycache__", "encodings", "ensurepip", "idlelib", "lib2to3", "pydoc_data"}
    | {"dist-packages", "site-packages", "test", "tests", "turtledemo", "lib-dynload"}
)
"""Folders with tables of numbers, with tests, and outside of the standard library."""

SKIPPED_FILES: Final = ("entities.py", "stringprep.py", "_casefix.py", "_sysconfigdata")
"""Prefixes of the names of files that hold tables. Their tokens have one or two characters, so a
prompt from such a file is far longer than its estimate."""

FIRST_NAMES: Final = 5
"""Number of names that the code of a class uses before its body, of which one is `__doc__` if it
has a docstring."""


@dataclass(frozen=True, slots=True)
class Document:
    """A text by name.

    Attributes:
        name: unique in its library.
        size: its weight in random draws, roughly its length in characters, and at least 1.
        read: a function that returns the text, which may be empty.
    """

    name: str
    size: int
    read: Callable[[], str]


class TextPosition(NamedTuple):
    """The start of a passage: the index of a document and an offset in characters."""

    document: int
    offset: int


class Library:
    """Documents read as one endless text, in which the first document follows the last.

    Raises:
        ValueError: the list of documents is empty.
    """

    def __init__(self, documents: Sequence[Document]) -> None:
        if not documents:
            raise ValueError(
                "no Python sources are installed to write prompts from: use --text-file"
            )
        self._documents = sorted(documents, key=lambda document: document.name)
        self._ends = list(accumulate(max(document.size, 1) for document in self._documents))
        self._texts: dict[int, str] = {}

    def random_position(self, rng: Random) -> TextPosition:
        """Return the start of a random line, about uniform over the text, reading one document."""
        document = bisect_right(self._ends, rng.randrange(self._ends[-1]))
        text = self._text(document)
        return TextPosition(document, text.rfind("\n", 0, rng.randrange(len(text) + 1)) + 1)

    def read(self, position: TextPosition, characters: int) -> str:
        """Return exactly that many characters from a position, across documents if necessary.

        Raises:
            ValueError: every document is empty.
        """
        document, offset = position
        pieces = [self._text(document)[offset : offset + characters]]
        missing, empty = characters - len(pieces[0]), 0
        while missing > 0:
            document = (document + 1) % len(self._documents)
            text = self._text(document)[:missing]
            empty = 0 if text else empty + 1
            if empty == len(self._documents):
                raise ValueError("no text for prompts: every document is empty")
            pieces.append(text)
            missing -= len(text)
        return "".join(pieces)

    def _text(self, document: int) -> str:
        if document not in self._texts:
            self._texts[document] = self._documents[document].read()
        return self._texts[document]


class TextCorpus:
    """Libraries of code and prose, and questions about them.

    Attributes:
        source: the origin of the texts.
    """

    def __init__(
        self,
        source: str,
        code: Callable[[], Sequence[Document]],
        prose: Callable[[], Sequence[Document]],
        pairs: Callable[[], Sequence[Pair]],
    ) -> None:
        self.source = source
        self._code, self._prose, self._pairs = code, prose, pairs

    @cached_property
    def code(self) -> Library:
        """Python sources, or the user's file."""
        return Library(self._code())

    @cached_property
    def prose(self) -> Library:
        """Docstrings, or the user's file."""
        return Library(self._prose())

    @cached_property
    def pairs(self) -> Sequence[Pair]:
        """Questions with their passages, from held-out modules or from the user's file.

        Raises:
            ValueError: the texts hold no pair.
        """
        found = self._pairs()
        if not found:
            raise ValueError(f"{self.source} holds no sections to ask about")
        return found


def open_corpus(text_file: Path | None = None) -> TextCorpus:
    """Return the corpus of this installation, or of a file, whose text is both code and prose.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file holds no text.
    """
    return _installed() if text_file is None else _from_file(text_file)


@cache
def _installed() -> TextCorpus:
    root = Path(sysconfig.get_path("stdlib"))

    def read(name: str) -> str:
        return (root / name).read_text(encoding="utf-8", errors="replace")

    return TextCorpus(
        f"standard library of {platform.python_implementation()} {platform.python_version()}",
        code=lambda: [Document(name, size, partial(read, name)) for name, size in _sources(root)],
        prose=lambda: [
            Document(name, size, partial(docstrings, root / name)) for name, size in _sources(root)
        ],
        pairs=lambda: installed_pairs(
            (name, partial(read, name))
            for name in (*(name for name, _ in _sources(root)), TOPICS)
            if (root / name).is_file()
        ),
    )


def _from_file(path: Path) -> TextCorpus:
    text = path.read_text(encoding="utf-8", errors="replace")
    if not text.strip():
        raise ValueError(f"{path} holds no text")
    documents = [Document(path.name, len(text), lambda: text)]
    return TextCorpus(
        f"file {path.name}",
        code=lambda: documents,
        prose=lambda: documents,
        pairs=lambda: file_pairs(text),
    )


def _sources(root: Path) -> Iterator[tuple[str, int]]:
    """Yield the path below `root` and the bytes of each Python source."""
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in SKIPPED_FOLDERS]
        for name in files:
            if name.endswith(".py") and not name.startswith(SKIPPED_FILES):
                path = Path(folder, name)
                yield path.relative_to(root).as_posix(), path.stat().st_size


def docstrings(path: Path) -> str:
    """Return a module's docstrings in order, each with the name of its class or function.

    They are read from the compiled module, which Python caches. Parsing the sources of the standard
    library takes ten times as long (1.7 s, 2 cores of a Xeon, 2026-11-30).

    The result is empty if the source does not compile.

    Raises:
        OSError: the file cannot be read.
    """
    try:
        module = SourceFileLoader(path.stem, str(path)).get_code(path.stem)
    except (SyntaxError, ValueError):
        return ""
    assert module is not None
    texts = [_docstring(module, place=0)]
    for code in sorted(_named_codes(module), key=lambda code: code.co_firstlineno):
        text = _docstring(code, place=1)  # the first string of a class is its name
        texts.append(text and f"{code.co_name}: {text}")
    return "".join(f"{text}\n\n" for text in texts if text)


def _named_codes(module: CodeType) -> list[CodeType]:
    """Return the code of the classes and functions of a module, outer ones before inner ones."""
    found = [module]
    for code in found:
        nested = (each for each in code.co_consts if isinstance(each, CodeType))
        found += [each for each in nested if not each.co_name.startswith("<")]
    return found[1:]


def _docstring(code: CodeType, place: int) -> str | None:
    """Return the docstring of a module, a class or a function.

    Args:
        place: index of the docstring among the strings of a module or class.
    """
    if code.co_flags & inspect.CO_OPTIMIZED:  # a function, whose class knows the docstring
        cells = tuple(CellType() for _ in code.co_freevars)
        found = FunctionType(code, {}, closure=cells).__doc__
    elif "__doc__" in code.co_names[:FIRST_NAMES]:
        strings = [each for each in code.co_consts if isinstance(each, str)]
        found = strings[place] if place < len(strings) else None
    else:
        found = None
    return found and inspect.cleandoc(found)
