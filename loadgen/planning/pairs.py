"""Questions with the passage that answers each, from texts of every Python installation.

A documented function is one pair: the summary of its docstring is the question, and its code
without the docstring is the passage. A section is another pair: its heading is the question, and
its text is the passage. The right passage of a question is therefore known, and its words and
meaning lead to it. Docstrings of modules and classes are sections with their summary as heading.
"""

from __future__ import annotations

import ast
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from textwrap import dedent, shorten
from typing import Final, NamedTuple, TypeAlias

CODE: Final = "code"
DOCUMENTATION: Final = "documentation"
SOURCES: Final = (CODE, DOCUMENTATION)

HELD_OUT_ONE_IN: Final = 5
"""One of this many modules is held out from training, by its hash."""

LEAST_WORDS: Final = 3
LEAST_CHARACTERS: Final = 200
"""Shorter questions, such as `Notes`, and shorter passages, such as a function of one line, do not
identify each other. Python 3.11 has 960 longer pairs in its held-out modules."""

MOST_QUESTION_CHARACTERS: Final = 160
"""Limit of a question. Longer first sentences are rare (2% with Python 3.11)."""

MOST_SOURCE_CHARACTERS: Final = 8_000_000
"""Limit of the sources to read. The held-out modules of Python 3.11 have 3.1 million characters,
which take 1.0 s (AMD EPYC, 2026-11-26)."""

BLOCK_CHARACTERS: Final = 1000
"""Length of the blocks of a file without headings, about the passage of 256 tokens."""

TOPICS: Final = "pydoc_data/topics.py"
"""The module with the language reference. Its dictionary has a document for each topic."""

_HEADING: Final = re.compile(
    r"^(?:#{1,6} +(?P<marked>\S.*)|(?P<underlined>\S.*)\n(?P<rule>[=\-*~^])(?P=rule){2,} *)$",
    re.MULTILINE,
)
_SENTENCE_END: Final = re.compile(r"(?<=[.!?])\s")
_WORD: Final = re.compile(r"\w+")


class Pair(NamedTuple):
    """A question, the passage that answers it, and the passage's source (one of `SOURCES`)."""

    question: str
    passage: str
    source: str


def is_held_out(module: str) -> bool:
    """Whether a top-level module of the standard library is held out from training.

    The SHA-256 of the module's name, as one big-endian integer, is then divisible by 5. Questions
    come only from such modules. An embedding model that trains on the standard library must skip
    them, or its results on this collection are no measure of retrieval.

    Args:
        module: the first part of the module's dotted name, such as `email` for `email.header`.
    """
    return int(sha256(module.encode()).hexdigest(), 16) % HELD_OUT_ONE_IN == 0


def installed_pairs(sources: Iterable[tuple[str, Callable[[], str]]]) -> list[Pair]:
    """Return the pairs of the held-out modules, in a fixed order that mixes modules.

    Args:
        sources: the path of each module below the library's root, and a function that reads it.
    """
    found, read_characters = list[Pair](), 0
    for name, read in sorted(sources, key=lambda source: source[0]):
        if not is_held_out(Path(name).parts[0].removesuffix(".py")):
            continue
        text = read()
        read_characters += len(text)
        if read_characters > MOST_SOURCE_CHARACTERS:
            break
        found += _topic_pairs(text) if name == TOPICS else _module_pairs(text)
    return _distinct(filter(_is_clear, found))


def source_pairs(texts: Iterable[str]) -> list[Pair]:
    """Return the pairs of Python sources, of any module."""
    return _distinct(pair for text in texts for pair in _module_pairs(text) if _is_clear(pair))


def file_pairs(text: str) -> list[Pair]:
    """Return the sections of a user's file, or its blocks if it has no headings."""
    return _distinct(_as_pairs(sections(text) or _blocks(text)))


def sections(text: str) -> list[tuple[str, str]]:
    """Return the heading and the text of each section.

    A heading is a line that starts with `#`, or a line above a line of `=`, `-`, `*`, `~` or `^`.
    """
    headings = list(_HEADING.finditer(text))
    starts = [*(heading.start() for heading in headings), len(text)]
    return [
        (heading["marked"] or heading["underlined"], text[heading.end() : end])
        for heading, end in zip(headings, starts[1:], strict=True)
    ]


def _is_clear(pair: Pair) -> bool:
    """Whether question and passage can identify each other. Doctests and short texts cannot."""
    words = _WORD.findall(pair.question)
    doctest = pair.question.startswith(">>>")
    return len(words) >= LEAST_WORDS and not doctest and len(pair.passage) >= LEAST_CHARACTERS


def _blocks(text: str) -> list[tuple[str, str]]:
    """Return the first line of each block of whole lines, and the rest of the block."""
    starts = [0]
    while (next_start := text.find("\n", starts[-1] + BLOCK_CHARACTERS) + 1) > 0:
        starts.append(next_start)
    blocks = (text[start:end].strip() for start, end in pairwise([*starts, len(text)]))
    return [(first, rest) for first, _, rest in (block.partition("\n") for block in blocks)]


def _module_pairs(text: str) -> Iterator[Pair]:
    """Yield the functions and the docstrings of a module, or nothing if it does not parse."""
    tree, lines = parse_module(text), text.splitlines()
    if tree is None:
        return
    yield from _docstring_pair(tree)
    for node in named_nodes(tree):
        if isinstance(node, ast.ClassDef):
            yield from _docstring_pair(node)
        elif (docstring := ast.get_docstring(node)) and (code := _without_docstring(node, lines)):
            yield Pair(_summary(docstring), code, CODE)


def _docstring_pair(node: ast.Module | ast.ClassDef) -> Iterator[Pair]:
    summary, _, rest = (ast.get_docstring(node) or "").partition("\n\n")
    if rest.strip():
        yield Pair(_summary(summary), rest.strip(), DOCUMENTATION)


def _without_docstring(node: NamedNode, lines: Sequence[str]) -> str:
    """Return the code of a function without its docstring, or nothing if that is its body."""
    docstring, *rest = node.body
    if not rest or docstring.lineno == node.lineno:
        return ""
    code = [*lines[node.lineno - 1 : docstring.lineno - 1]]
    code += lines[docstring.end_lineno or docstring.lineno : node.end_lineno]
    return dedent("\n".join(code))


def _topic_pairs(text: str) -> Iterator[Pair]:
    """Yield the sections of the documents in a module's dictionary of constants."""
    for node in ast.walk(parse_module(text) or ast.Module([], [])):
        if isinstance(node, ast.Dict):
            for value in node.values:
                if isinstance(value, ast.Constant) and isinstance(value.value, str):
                    yield from _as_pairs(sections(value.value))


def _as_pairs(found: Iterable[tuple[str, str]]) -> Iterator[Pair]:
    for heading, body in found:
        if _WORD.search(heading) and _WORD.search(body):
            yield Pair(_summary(heading), body.strip("\n"), DOCUMENTATION)


def _summary(text: str) -> str:
    """Return the first sentence of a text on one line, cut at a word."""
    first = _SENTENCE_END.split(text.strip().partition("\n\n")[0], maxsplit=1)[0]
    return shorten(first, MOST_QUESTION_CHARACTERS, placeholder="")


def _distinct(pairs: Iterable[Pair]) -> list[Pair]:
    """Return pairs without equal questions or passages, in the order of their hashes.

    The hash mixes the modules, so that the first pairs of the collection come from all of them.
    """
    by_question, passages = dict[str, Pair](), set[str]()
    for pair in pairs:
        if pair.question and pair.question not in by_question and pair.passage not in passages:
            by_question[pair.question] = pair
            passages.add(pair.passage)
    return sorted(by_question.values(), key=lambda pair: sha256(pair.question.encode()).digest())


NamedNode: TypeAlias = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef

_STATEMENT_LISTS: Final = ("body", "handlers", "orelse", "finalbody", "cases")
"""The fields of syntax nodes that contain statements, or clauses with statements."""


def parse_module(source: str) -> ast.Module | None:
    """Return the syntax tree of a module, or None if the source does not parse."""
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError):
        return None


def named_nodes(tree: ast.Module) -> list[NamedNode]:
    """Return the classes and functions of a module in the order of their lines."""
    return sorted(_search(tree), key=lambda node: node.lineno)


def _search(tree: ast.Module) -> Iterator[NamedNode]:
    """Yield the classes and functions of a module, outer ones before inner ones.

    The search skips expressions, which contain most nodes but no definition.
    """
    waiting: deque[ast.AST] = deque((tree,))
    while waiting:
        node = waiting.popleft()
        if isinstance(node, NamedNode):
            yield node
        for name in _STATEMENT_LISTS:
            waiting.extend(getattr(node, name, ()))
