"""Questions and the passages that answer them: held-out modules, functions and sections."""

from __future__ import annotations

import re
from collections import Counter

import pytest

from draftgate.loadgen.planning import pairs
from draftgate.loadgen.planning.corpus import open_corpus
from draftgate.loadgen.planning.pairs import (
    CODE,
    DOCUMENTATION,
    LEAST_CHARACTERS,
    LEAST_WORDS,
    MOST_QUESTION_CHARACTERS,
    Pair,
    file_pairs,
    installed_pairs,
    is_held_out,
    sections,
    source_pairs,
)

BODY = "".join(f"    step_{n} = prepare(value, {n})\n" for n in range(9))
FUNCTION = (
    f'def load(value):\n    """Read a value from the disk. Then stop.\n\n    More.\n    """\n{BODY}'
)
CLASS_TEXT = "A store keeps values between runs. " * 8
CLASS = f'class Store:\n    """Keep values on disk.\n\n    {CLASS_TEXT}\n    """\n'


@pytest.mark.parametrize(
    ("module", "held_out"),
    [
        *(("email", True), ("enum", True), ("pydoc_data", True), ("tarfile", True)),
        *(("asyncio", False), ("json", False), ("logging", False), ("os", False)),
    ],
)
def test_modules_are_held_out_by_a_stable_hash(module: str, held_out: bool) -> None:
    """The rule never changes, because trained models depend on it."""
    assert is_held_out(module) == held_out


def test_a_fifth_of_all_modules_is_held_out() -> None:
    """The share of held-out names is 1 in 5 (four standard deviations of 2,000 names: 3.6%)."""
    share = sum(is_held_out(f"module_{n}") for n in range(2000)) / 2000
    assert share == pytest.approx(0.2, abs=0.036)


def installed(**texts: str) -> list[Pair]:
    """Return the pairs of modules, whose file names replace `__` by `/`."""
    return installed_pairs(
        (f"{name.replace('__', '/')}.py", lambda text=text: text) for name, text in texts.items()
    )


def test_a_function_is_found_by_its_summary_and_a_class_by_its_text() -> None:
    """Questions are first sentences, and passages lack the docstring."""
    found = installed(enum=FUNCTION + CLASS)
    assert sorted(found, key=lambda pair: pair.source) == [
        Pair("Read a value from the disk.", f"def load(value):\n{BODY}".rstrip(), CODE),
        Pair("Keep values on disk.", CLASS_TEXT.strip(), DOCUMENTATION),
    ]


def test_methods_lose_their_indentation() -> None:
    """The passage of a nested function starts at the left margin."""
    lines = f"class Store:\n{FUNCTION}".split("\n")
    nested = "\n    ".join(lines)
    (pair,) = installed(email__store=nested)
    assert pair.passage.startswith("def load(value):\n    step_0")


@pytest.mark.parametrize(
    "text",
    [
        "def (",
        "def f(value):\n    return value\n",
        'def f(value):\n    """Return the given value unchanged."""\n',
        'def f(value):\n    """Return the given value unchanged."""\n    return value\n',
        f'def f(value):\n    """Load it."""\n{BODY}',
        f'def f(value):\n    """\n    >>> f(1) + f(2) + f(3)\n    """\n{BODY}',
    ],
)
def test_unclear_functions_give_no_question(text: str) -> None:
    """Invalid, undocumented, empty, short and doctested functions are skipped."""
    assert installed(enum=text) == []


def test_trained_modules_are_not_read() -> None:
    """The collection reads only held-out modules."""

    def refuse() -> str:
        pytest.fail("read a module that models train on")

    assert installed_pairs([("json/decoder.py", refuse), ("os.py", refuse)]) == []


def test_pairs_of_given_sources_need_no_held_out_module() -> None:
    """Sources without names give the same pairs as held-out modules."""
    assert source_pairs([FUNCTION + CLASS, "def ("]) == installed(enum=FUNCTION + CLASS)


def test_the_order_of_files_does_not_matter() -> None:
    """Pairs have an order of their own, and equal questions occur once."""
    other = FUNCTION.replace("Read a value", "Write one value").replace("prepare", "write")
    again = FUNCTION.replace("prepare", "repeat")
    found = installed(enum=FUNCTION, email=other, tarfile=again)
    assert [pair.question for pair in found] == [
        pair.question for pair in installed(tarfile=again, email=other, enum=FUNCTION)
    ]
    assert Counter(pair.question for pair in found).most_common(1)[0][1] == 1
    assert len(found) == 2


def test_reading_stops_at_the_limit(monkeypatch) -> None:
    """An installation with very large modules does not delay a run without bound."""
    monkeypatch.setattr(pairs, "MOST_SOURCE_CHARACTERS", len(FUNCTION) + 10)
    other = FUNCTION.replace("Read a value", "Write one value").replace("prepare", "write")
    assert len(installed(email=FUNCTION, enum=other)) == 1


def test_topics_are_sections_of_documentation() -> None:
    """The dictionary of the language reference gives a pair for each section."""
    text = "It runs a block. " * 20
    topics = {
        "with": f'The "with" statement\n{"*" * 20}\n\n{text}\n\nUse of many files\n====\n{text}!'
    }
    found = installed_pairs([("pydoc_data/topics.py", lambda: f"topics = {topics!r}\n")])
    assert {pair.question for pair in found} == {'The "with" statement', "Use of many files"}
    assert {pair.source for pair in found} == {DOCUMENTATION}


def test_headings_are_marked_or_underlined() -> None:
    """A section extends to the next heading."""
    text = "ignored\n# One\na\n\nTwo\n---\nb\nc\n### Three ###\n"
    assert sections(text) == [("One", "\na\n\n"), ("Two", "\nb\nc\n"), ("Three ###", "\n")]
    assert {(pair.question, pair.passage) for pair in file_pairs(text)} == {
        ("One", "a"),
        ("Two", "b\nc"),
    }


def test_a_file_without_headings_gives_blocks() -> None:
    """The first line of each block is its heading, and no line is lost."""
    lines = [f"line {n} of the file" for n in range(500)]
    found = file_pairs("\n".join(lines))
    assert len(found) == pytest.approx(sum(map(len, lines)) / 1000, abs=1.5)
    assert sorted("\n".join(f"{p.question}\n{p.passage}" for p in found).split("\n")) == sorted(
        lines
    )
    assert file_pairs("\n \n") == []


def test_a_file_without_text_below_its_headings_is_refused(tmp_path) -> None:
    """The error names the file."""
    path = tmp_path / "empty.md"
    path.write_text("# One\n# Two\n")
    with pytest.raises(ValueError, match=r"empty\.md holds no sections"):
        _ = open_corpus(path).pairs


def test_the_installed_library_has_enough_questions_of_both_kinds() -> None:
    """Every Python has more pairs than the index holds, all distinct and within the limits."""
    found = open_corpus().pairs
    assert len(found) > 400
    assert len({pair.question for pair in found}) == len({pair.passage for pair in found})
    kinds = Counter(pair.source for pair in found[:256])
    assert kinds[CODE] > kinds[DOCUMENTATION] > 10
    for pair in found:
        assert len(pair.passage) >= LEAST_CHARACTERS
        assert len(pair.question) <= MOST_QUESTION_CHARACTERS
        assert len(re.findall(r"\w+", pair.question)) >= LEAST_WORDS
