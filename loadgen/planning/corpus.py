"""Text to ask about: the standard library, its docstrings, what packages say of themselves.

Every Python has it, so a load needs no data set and no network; or a file the user gives. The order
is the sorted one of the names: one installation always gives one corpus, two Python versions give
two. Texts are read when first wanted and then kept (all of them are some 15 MB).
"""

from __future__ import annotations

import ast
import os
import platform
import sysconfig
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from importlib.metadata import distributions
from itertools import accumulate
from pathlib import Path
from random import Random
from typing import Final, NamedTuple

NO_READING: Final = frozenset(
    {"__pycache__", "encodings", "ensurepip", "idlelib", "lib2to3", "pydoc_data"}
    | {"dist-packages", "site-packages", "test", "tests", "turtledemo", "lib-dynload"}
)
"""Folders left out: tables of numbers, tests, and what is not the standard library."""

TABLES: Final = ("entities.py", "stringprep.py", "_casefix.py", "_sysconfigdata")
"""Files left out, by how their names begin: tables written as code, of which a token is a character
or two, so that a prompt made of them is far longer than its estimate."""

LEAST_LETTERS: Final = 0.85
"""Share of ASCII letters and spaces in a paragraph of prose; below, a token has few characters and
estimates of a prompt's length are far off."""


@dataclass(frozen=True, slots=True)
class Document:
    """A text by name.

    Attributes:
        name: unique in its library; libraries are sorted by it.
        size: its weight among others, about its length in characters; at least 1.
        read: return the text; it may be empty.
    """

    name: str
    size: int
    read: Callable[[], str]


class Place(NamedTuple):
    """Where a passage begins: which document, and how many characters into it."""

    document: int
    offset: int


class Library:
    """Documents read as one endless text: after the last comes the first."""

    def __init__(self, documents: Sequence[Document]) -> None:
        """Arrange them.

        Raises:
            ValueError: there are none.
        """
        if not documents:
            raise ValueError("no text to ask about: no Python sources are here; give a text file")
        self._documents = sorted(documents, key=lambda document: document.name)
        self._ends = list(accumulate(max(document.size, 1) for document in self._documents))
        self._texts: dict[int, str] = {}

    def __len__(self) -> int:
        return len(self._documents)

    def name(self, place: Place) -> str:
        """Return the name of the document a place is in."""
        return self._documents[place.document].name

    def place(self, rng: Random) -> Place:
        """Draw a line's beginning, about uniformly over the text. Reads that document alone."""
        document = bisect_right(self._ends, rng.randrange(self._ends[-1]))
        text = self._text(document)
        return Place(document, text.rfind("\n", 0, rng.randrange(len(text) + 1)) + 1)

    def read(self, place: Place, characters: int) -> str:
        """Return exactly that many characters from a place on, running on into what follows.

        Raises:
            ValueError: every document is empty.
        """
        pieces = [self._text(place.document)[place.offset : place.offset + characters]]
        missing, empty, document = characters - len(pieces[0]), 0, place.document
        while missing > 0:
            document = (document + 1) % len(self._documents)
            text = self._text(document)[:missing]
            empty = 0 if text else empty + 1
            if empty == len(self._documents):
                raise ValueError("no text to ask about: every document is empty")
            pieces.append(text)
            missing -= len(text)
        return "".join(pieces)

    def _text(self, document: int) -> str:
        if document not in self._texts:
            self._texts[document] = self._documents[document].read()
        return self._texts[document]


class TextCorpus:
    """Code and prose, each a library. `source` says in words where they come from."""

    def __init__(
        self,
        source: str,
        code: Callable[[], Sequence[Document]],
        prose: Callable[[], Sequence[Document]],
    ) -> None:
        self.source = source
        self._code, self._prose = code, prose

    @cached_property
    def code(self) -> Library:
        """Python sources (or the user's file)."""
        return Library(self._code())

    @cached_property
    def prose(self) -> Library:
        """Docstrings and descriptions of packages (or the user's file)."""
        return Library(self._prose())


def open_corpus(text_file: Path | None = None) -> TextCorpus:
    """Return this installation's corpus, or that of one file, whose text is then code and prose.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file holds no text.
    """
    return _installed() if text_file is None else _from_file(text_file)


@cache
def _installed() -> TextCorpus:
    root = Path(sysconfig.get_path("stdlib"))
    return TextCorpus(
        f"standard library of {platform.python_implementation()} {platform.python_version()}"
        " and descriptions of the installed packages",
        code=lambda: [Document(*entry, _reader(root / entry[0])) for entry in _sources(root)],
        prose=lambda: [
            *(Document(*entry, _docstring_reader(root / entry[0])) for entry in _sources(root)),
            *_descriptions(),
        ],
    )


def _from_file(path: Path) -> TextCorpus:
    text = path.read_text(encoding="utf-8", errors="replace")
    if not text.strip():
        raise ValueError(f"{path} holds no text")
    documents = [Document(path.name, len(text), lambda: text)]
    return TextCorpus(f"file {path.name}", code=lambda: documents, prose=lambda: documents)


def _sources(root: Path) -> Iterator[tuple[str, int]]:
    """Yield the path below `root` and the bytes of each Python source."""
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in NO_READING]
        for path in (Path(folder, name) for name in files if _is_read(name)):
            yield path.relative_to(root).as_posix(), path.stat().st_size


def _is_read(name: str) -> bool:
    return name.endswith(".py") and not name.startswith(TABLES)


def _reader(path: Path) -> Callable[[], str]:
    return lambda: path.read_text(encoding="utf-8", errors="replace")


def _docstring_reader(path: Path) -> Callable[[], str]:
    return lambda: docstrings(path.read_text(encoding="utf-8", errors="replace"))


def docstrings(source: str) -> str:
    """Return a module's docstrings in order, those of classes and functions after their names.

    Empty if the source does not parse.
    """
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return ""
    texts = [ast.get_docstring(tree)]
    named = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in ast.walk(tree) if isinstance(node, named)]
    for node in sorted(nodes, key=lambda node: node.lineno):
        text = ast.get_docstring(node)
        texts.append(text and f"{node.name}: {text}")
    return "".join(f"{text}\n\n" for text in texts if text)


def _descriptions() -> Iterator[Document]:
    """Yield what each installed package says of itself."""
    found = {}
    for distribution in distributions():
        metadata = distribution.metadata
        text = metadata.get("Description") or metadata.get_payload()  # type: ignore[attr-defined]
        prose = _paragraphs(text) if isinstance(text, str) else ""
        if prose:
            found[f"{metadata['Name']} {metadata['Version']}"] = prose
    for name, text in found.items():
        yield Document(name, len(text), partial(str, text))


def _paragraphs(text: str) -> str:
    """Return the paragraphs that are prose, not tables, badges or lists of links."""
    paragraphs = [paragraph.strip("\n") for paragraph in text.split("\n\n")]
    return "".join(f"{paragraph}\n\n" for paragraph in paragraphs if _is_prose(paragraph))


def _is_prose(paragraph: str) -> bool:
    plain = sum(c.isascii() and (c.isalpha() or c.isspace()) for c in paragraph)
    return plain > LEAST_LETTERS * len(paragraph)
