"""The corpus reads installed text on demand, in a fixed order."""

from __future__ import annotations

import ast
import sysconfig
from collections import Counter
from pathlib import Path
from random import Random

import pytest
import scipy

from draftgate.loadgen.planning.corpus import (
    Document,
    Library,
    TextPosition,
    docstrings,
    open_corpus,
)
from draftgate.loadgen.planning.pairs import named_nodes


def test_a_library_reads_only_what_is_needed() -> None:
    """The library opens a single document of a thousand to choose and read a short passage."""
    opened: list[str] = []

    def document(name: str) -> Document:
        return Document(name, 100, lambda: opened.append(name) or f"{name}\n" * 20)

    library = Library([document(f"{n:04}") for n in range(1000)])
    place = library.random_position(Random(0))
    library.read(place, 5)
    assert opened == [library._documents[place.document].name]


def test_a_library_is_one_endless_text_in_the_order_of_names() -> None:
    """Reading continues in the next document by name, skips empty documents, and wraps around."""
    texts = {"c": "cc", "a": "aaa", "b": ""}
    library = Library([Document(name, 1, lambda t=text: t) for name, text in texts.items()])
    assert library.read(TextPosition(0, 1), 10) == "aaccaaacca"
    assert library.read(TextPosition(2, 0), 6) == "ccaaac"
    with pytest.raises(ValueError, match="every document is empty"):
        Library([Document("a", 1, lambda: "")]).read(TextPosition(0, 0), 1)
    with pytest.raises(ValueError, match="--text-file"):
        Library([])


def test_positions_are_line_starts_in_proportion_to_size() -> None:
    """The library chooses a three times larger document three times as often (chi-square)."""
    line = "four\n"
    library = Library([Document(n, 5 * k, lambda k=k: line * k) for n, k in (("a", 30), ("b", 90))])
    rng = Random(4)
    places = [library.random_position(rng) for _ in range(2000)]
    assert all(place.offset % 5 == 0 for place in places)
    seen = Counter(place.document for place in places)
    assert scipy.stats.chisquare([seen[0], seen[1]], [500, 1500]).pvalue > 1e-3


SOURCE = '''
"M."
class C:
    "K."
    def f(self):
        "F."
        x = "no"
        @no
        def g():
            """
            G.
              g.
            """
            return x
        return [y for y in "no"] if g() else lambda: "no"
    class D:
        y = "no"
async def h():
    x = "no"
'''


def test_docstrings_are_taken_from_modules_classes_and_functions(tmp_path) -> None:
    """The function finds all three kinds in order without other strings, and none in invalid
    source."""
    path = tmp_path / "module.py"
    path.write_text(SOURCE)
    assert docstrings(path) == "M.\n\nC: K.\n\nf: F.\n\ng: G.\n  g.\n\n"
    path.write_text("'M.'" + SOURCE.replace("class C", "class C("))
    assert docstrings(path) == ""


@pytest.mark.parametrize("name", ["argparse.py", "asyncio/tasks.py", "enum.py", "statistics.py"])
def test_compiled_modules_have_the_docstrings_of_their_source(name: str) -> None:
    """The docstrings equal those of the syntax tree."""
    path = Path(sysconfig.get_path("stdlib"), name)
    tree = ast.parse(path.read_text(encoding="utf-8"))
    texts = [(ast.get_docstring(tree), "")]
    texts += [(ast.get_docstring(node), f"{node.name}: ") for node in named_nodes(tree)]
    assert docstrings(path) == "".join(f"{name}{text}\n\n" for text, name in texts if text)


def test_modules_that_hold_tables_are_skipped() -> None:
    """The corpus skips the table of HTML entities, but not the rest of its package."""
    code = open_corpus().code
    names = {document.name for document in code._documents}
    assert "html/parser.py" in names
    assert "html/entities.py" not in names
    assert "stringprep.py" not in names
    assert not [name for name in names if name.startswith("_sysconfigdata")]


def test_installed_packages_do_not_change_the_corpus() -> None:
    """Prose comes from the same files of the standard library as code."""
    corpus = open_corpus()
    prose = [document.name for document in corpus.prose._documents]
    assert prose == [document.name for document in corpus.code._documents]
    assert "installed" not in corpus.source
