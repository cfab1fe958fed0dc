"""Built-in proposers and a proposer of another package keep their contract."""

from __future__ import annotations

import textwrap
from dataclasses import replace
from pathlib import Path

import pytest

from draftgate.backends.core.drafts import Draft
from draftgate.backends.engine.testing import check_draft, check_proposer

LINE_PROPOSER = '''
"""Drafts the continuation of the last match of two tokens."""

from draftgate.backends.core.drafts import Draft


class LineProposer:
    def __init__(self, newline):
        self._newline = newline

    def depth_s(self, sequences):
        return 0.0

    def catch_up_s(self, sequence):
        return 0.0

    def propose(self, requests):
        return [self._draft(r.sequence.token_ids, r.max_tokens) for r in requests]

    def _draft(self, tokens, most):
        for start in range(len(tokens) - 2, 0, -1):
            if tokens[start] == tokens[-1] and tokens[start - 1] == tokens[-2]:
                return Draft(tuple(tokens[start + 1 : start + 1 + most]), evidence=2)
        return Draft((self._newline,))

    def forget(self, sequence):
        pass


def build(setup):
    return LineProposer(newline=10)
'''


@pytest.fixture
def installed_proposer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """An installed package that offers the proposer `lines`."""
    (tmp_path / "line_proposer.py").write_text(textwrap.dedent(LINE_PROPOSER))
    facts = tmp_path / "line_proposer-1.0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: line-proposer\nVersion: 1.0\n")
    (facts / "entry_points.txt").write_text("[draftgate.proposers]\nlines = line_proposer:build\n")
    monkeypatch.syspath_prepend(tmp_path)
    return "lines"


@pytest.mark.parametrize("name", ["ngram", "draft_model", "sparse_self"])
def test_built_in_proposer_keeps_the_contract(name: str) -> None:
    """A built-in proposer returns well-formed drafts, changes no text, and keeps no state of
    finished sequences."""
    check_proposer(name)


def test_proposer_of_another_package_is_found_and_keeps_the_contract(
    installed_proposer: str,
) -> None:
    """The engine finds a proposer of another package by its entry point."""
    assert len(LINE_PROPOSER.strip().splitlines()) <= 30
    check_proposer(installed_proposer)


def test_unknown_proposer_error_lists_the_known_proposers(installed_proposer: str) -> None:
    """The error lists the built-in proposers and the proposers of other packages."""
    with pytest.raises(ValueError, match=r"unknown proposer 'guess'; known: ngram, .*lines"):
        check_proposer("guess")


GOOD = Draft((1, 2, 3), (-1, -1, 0), (0.6, 0.4, 1.0))


@pytest.mark.parametrize(
    ("broken", "rule"),
    [
        (replace(GOOD, token_ids=(1, 2, 99)), "vocabulary"),
        (replace(GOOD, parents=(-1, -1)), "parents are given"),
        (replace(GOOD, shares=(1.0,)), "shares are given"),
        (replace(GOOD, parents=(-1, 2, 0)), "parents come first"),
        (replace(GOOD, token_ids=(1, 1, 3)), "children of a parent"),
        (replace(GOOD, shares=(0.8, 0.4, 1.0)), "sum to at most 1"),
        (replace(GOOD, distributions=object()), "a chain"),
        (Draft((1, 2, 3, 4)), "at most max_tokens"),
    ],
)
def test_every_broken_rule_is_named(broken: Draft, rule: str) -> None:
    """Each conformance check fails with its own message."""
    check_draft(GOOD, 3, 50)
    with pytest.raises(AssertionError, match=rule):
        check_draft(broken, 3, 50)
