"""Drafts as chains and trees: pure arithmetic on places."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from draftgate.backends.core.drafts import ROOT, Draft


@st.composite
def trees(draw: st.DrawFn) -> Draft:
    """Trees of up to twelve tokens out of four, no two siblings alike."""
    tokens: list[int] = []
    parents: list[int] = []
    for place in range(draw(st.integers(0, 12))):
        parent = draw(st.integers(ROOT, place - 1))
        taken = {tokens[i] for i in range(place) if parents[i] == parent}
        if free := sorted(set(range(4)) - taken):
            tokens.append(draw(st.sampled_from(free)))
            parents.append(parent)
        else:
            break
    shares = tuple(1 / (1 + parents.count(parent)) for parent in parents)
    return Draft(tuple(tokens), tuple(parents), shares)


def paths(draft: Draft) -> dict[tuple[int, ...], int]:
    """Each token with all it follows, and its place."""
    found: dict[int, tuple[int, ...]] = {ROOT: ()}
    for place, token in enumerate(draft.token_ids):
        found[place] = (*found[draft.parent(place)], token)
    return {path: place for place, path in found.items() if place != ROOT}


drafts = trees() | st.lists(st.integers(0, 3), max_size=8).map(lambda t: Draft(tuple(t)))
texts = st.lists(st.integers(0, 3), max_size=8)


@given(drafts)
def test_depth_first_a_draft_is_the_same_tree(draft: Draft) -> None:
    """Laying out moves tokens, and changes neither what follows what nor any share."""
    laid = draft.depth_first()
    assert paths(laid).keys() == paths(draft).keys()
    for path, place in paths(laid).items():
        before = paths(draft)[path]
        assert (laid.shares[place : place + 1] or (1.0,)) == (
            draft.shares[before : before + 1] if not laid.is_chain else (1.0,)
        )


@given(drafts)
def test_depth_first_each_branch_is_a_run(draft: Draft) -> None:
    """A token stands behind its parent, or begins a branch behind everything below its siblings."""
    laid = draft.depth_first()
    for place in range(1, len(laid)):
        parent = laid.parent(place)
        if parent == place - 1:
            continue
        at = place - 1
        while at not in {parent, ROOT}:
            at = laid.parent(at)
        assert at == parent, "the branch before does not hang on the same token"
    assert laid.is_chain == all(laid.parent(i) == i - 1 for i in range(len(laid)))


def by_depth(position: int) -> float:
    """Chances that differ by depth."""
    return 0.9 - 0.05 * position


@given(drafts, st.integers(0, 14))
def test_any_leading_tokens_are_a_draft(draft: Draft, tokens: int) -> None:
    """Shortening keeps the best tokens, all of whose parents stay."""
    short = draft.first(tokens)
    assert len(short) == min(tokens, len(draft))
    assert short.token_ids == draft.token_ids[:tokens]
    assert paths(short).items() <= paths(draft).items()
    assert short.survivals(by_depth) == draft.survivals(by_depth)[:tokens]


@given(drafts, texts)
def test_a_walk_goes_as_far_as_the_draft_agrees(draft: Draft, text: list[int]) -> None:
    """The path is the longest beginning of the text that the tree has."""
    known = paths(draft)
    agreed = max((n for n in range(1, len(text) + 1) if tuple(text[:n]) in known), default=0)
    path = draft.accepted_places(text)
    assert path == tuple(known[tuple(text[: n + 1])] for n in range(agreed))
    goes_on = any(p[:-1] == tuple(text[:agreed]) for p in known)
    assert draft.was_rejected(path, text) == (goes_on and agreed < len(text))


@given(drafts, st.randoms(use_true_random=False))
def test_accepted_are_those_that_equal_the_tokens_drawn_before_them(draft: Draft, random) -> None:
    """From row to child while the row's token is a child; rows elsewhere do not matter."""
    laid = draft.depth_first()
    rows = [random.randrange(4) for _ in range(len(laid) + 1)]
    taken = laid.accepted_places(rows, per_row=True)
    text = [rows[0], *(rows[place + 1] for place in taken)]
    assert taken == laid.accepted_places(text)
    assert len(text) == len(taken) + 1


@given(trees())
def test_survivals_fall_along_a_path_and_split_among_siblings(draft: Draft) -> None:
    """A token is no likelier than its parent, siblings together no likelier than one child."""
    chances = draft.survivals(lambda _: 0.8)
    for parent in {ROOT, *range(len(draft))}:
        below = sum(chances[i] for i in range(len(draft)) if draft.parent(i) == parent)
        assert below <= 0.8 * (1.0 if parent == ROOT else chances[parent]) + 1e-12


def test_a_chain_survives_geometrically() -> None:
    """At 0.5, three tokens survive with 1/2, 1/4 and 1/8; their depths are 1, 2 and 3."""
    chain = Draft((7, 8, 9))
    assert chain.survivals(lambda _: 0.5) == pytest.approx((0.5, 0.25, 0.125))
    assert chain.depths == (1, 2, 3)
    assert chain.depth_first() is chain


def test_a_tree_of_one_branch_is_a_chain_once_depth_first() -> None:
    """Cutting all siblings away leaves nothing that a chain does not have."""
    tree = Draft((1, 2, 3), (ROOT, ROOT, 0), (0.6, 0.4, 1.0))
    assert tree.select([0, 2]).depth_first() == Draft((1, 3))
