"""Drafts as chains and as trees."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from draftgate.backends.core.drafts import ROOT, Draft


@st.composite
def trees(draw: st.DrawFn) -> Draft:
    """Draw trees of up to twelve tokens over an alphabet of four, without equal siblings."""
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
    """Map each token path to its place in the draft."""
    found: dict[int, tuple[int, ...]] = {ROOT: ()}
    for place, token in enumerate(draft.token_ids):
        found[place] = (*found[draft.parent(place)], token)
    return {path: place for place, path in found.items() if place != ROOT}


drafts = trees() | st.lists(st.integers(0, 3), max_size=8).map(lambda t: Draft(tuple(t)))
texts = st.lists(st.integers(0, 3), max_size=8)


@given(drafts)
def test_depth_first_keeps_the_tree(draft: Draft) -> None:
    """Reordering moves tokens but keeps their parents and shares."""
    laid = draft.depth_first()
    assert paths(laid).keys() == paths(draft).keys()
    for path, place in paths(laid).items():
        before = paths(draft)[path]
        assert (laid.shares[place : place + 1] or (1.0,)) == (
            draft.shares[before : before + 1] if not laid.is_chain else (1.0,)
        )


@given(drafts)
def test_depth_first_makes_branches_contiguous(draft: Draft) -> None:
    """A token follows its parent directly or begins a branch after its siblings' descendants."""
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


BY_DEPTH = tuple(0.9 - 0.05 * depth for depth in range(12))


@given(drafts, st.integers(0, 14))
def test_first_keeps_a_valid_draft(draft: Draft, tokens: int) -> None:
    """The selection keeps the best tokens with all their parents."""
    short = draft.first(tokens)
    assert len(short) == min(tokens, len(draft))
    assert short.token_ids == draft.token_ids[:tokens]
    assert paths(short).items() <= paths(draft).items()
    assert short.survivals(BY_DEPTH) == draft.survivals(BY_DEPTH)[:tokens]


@given(drafts, texts)
def test_accepted_places_is_the_longest_matching_path(draft: Draft, text: list[int]) -> None:
    """The accepted path is the longest prefix of the text that the tree contains."""
    known = paths(draft)
    agreed = max((n for n in range(1, len(text) + 1) if tuple(text[:n]) in known), default=0)
    path = draft.accepted_places(text)
    assert path == tuple(known[tuple(text[: n + 1])] for n in range(agreed))
    goes_on = any(p[:-1] == tuple(text[:agreed]) for p in known)
    assert draft.was_rejected(path, text) == (goes_on and agreed < len(text))


@given(drafts, st.randoms(use_true_random=False))
def test_accepted_places_per_row_follows_the_sampled_tokens(draft: Draft, random) -> None:
    """The path leads from each row to the child that equals its token, and ignores other rows."""
    laid = draft.depth_first()
    rows = [random.randrange(4) for _ in range(len(laid) + 1)]
    taken = laid.accepted_places(rows, per_row=True)
    text = [rows[0], *(rows[place + 1] for place in taken)]
    assert taken == laid.accepted_places(text)
    assert len(text) == len(taken) + 1


@given(trees())
def test_survivals_fall_along_a_path_and_split_among_siblings(draft: Draft) -> None:
    """No token is likelier than its parent, and siblings share the survival of a single child."""
    chances = draft.survivals((0.8,))
    for parent in {ROOT, *range(len(draft))}:
        below = sum(chances[i] for i in range(len(draft)) if draft.parent(i) == parent)
        assert below <= 0.8 * (1.0 if parent == ROOT else chances[parent]) + 1e-12


def test_a_chain_survives_geometrically() -> None:
    """Three tokens with a chance of 0.5 survive with 1/2, 1/4 and 1/8 at depths 1, 2 and 3."""
    chain = Draft((7, 8, 9))
    assert chain.survivals((0.5,)) == pytest.approx((0.5, 0.25, 0.125))
    assert chain.depths == (1, 2, 3)
    assert chain.depth_first() is chain


def test_depth_first_turns_a_single_branch_into_a_chain() -> None:
    """A tree without siblings becomes a chain."""
    tree = Draft((1, 2, 3), (ROOT, ROOT, 0), (0.6, 0.4, 1.0))
    assert tree.select([0, 2]).depth_first() == Draft((1, 3))
