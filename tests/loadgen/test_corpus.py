"""The corpus of installed text: read on demand, in a fixed order."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
from scipy.stats import chisquare

from draftgate.loadgen.planning.corpus import (
    Document,
    Library,
    TextPosition,
    docstrings,
    open_corpus,
)


def test_a_library_reads_only_what_is_needed() -> None:
    """Choosing and reading a short passage opens one document of a thousand."""
    opened: list[str] = []

    def document(name: str) -> Document:
        return Document(name, 100, lambda: opened.append(name) or f"{name}\n" * 20)

    library = Library([document(f"{n:04}") for n in range(1000)])
    place = library.random_position(Random(0))
    library.read(place, 5)
    assert opened == [library._documents[place.document].name]


def test_a_library_is_one_endless_text_in_the_order_of_names() -> None:
    """Reading continues in the next document by name, skips empty ones, and wraps around."""
    texts = {"c": "cc", "a": "aaa", "b": ""}
    library = Library([Document(name, 1, lambda t=text: t) for name, text in texts.items()])
    assert library.read(TextPosition(0, 1), 10) == "aaccaaacca"
    assert library.read(TextPosition(2, 0), 6) == "ccaaac"
    with pytest.raises(ValueError, match="every document is empty"):
        Library([Document("a", 1, lambda: "")]).read(TextPosition(0, 0), 1)
    with pytest.raises(ValueError, match="--text-file"):
        Library([])


def test_positions_are_line_starts_in_proportion_to_size() -> None:
    """A document three times as large is chosen three times as often (chi-square)."""
    line = "four\n"
    library = Library([Document(n, 5 * k, lambda k=k: line * k) for n, k in (("a", 30), ("b", 90))])
    rng = Random(4)
    places = [library.random_position(rng) for _ in range(2000)]
    assert all(place.offset % 5 == 0 for place in places)
    seen = Counter(place.document for place in places)
    assert chisquare([seen[0], seen[1]], [500, 1500]).pvalue > 1e-3


def test_docstrings_are_taken_from_modules_classes_and_functions() -> None:
    """All three kinds are found in order without other strings; invalid source has none."""
    source = "'M.'\nclass C:\n    'K.'\n    def f(self):\n        'F.'\n        x = 'no'\n"
    assert docstrings(source) == "M.\n\nC: K.\n\nf: F.\n\n"
    assert docstrings("def (") == ""


def test_modules_that_hold_tables_are_skipped() -> None:
    """The table of HTML entities is skipped; the rest of its package is not."""
    code = open_corpus().code
    names = {document.name for document in code._documents}
    assert "html/parser.py" in names
    assert "html/entities.py" not in names
    assert "stringprep.py" not in names
    assert not [name for name in names if name.startswith("_sysconfigdata")]
