"""Trees of drafts that grow best first from the confidences of a model."""

from __future__ import annotations

from itertools import product
from math import prod

import pytest

from draftgate.backends.core.draft_growth import MAX_TREE_TOKENS, READ_PER_PASS, Growth
from draftgate.backends.core.drafts import NO_DRAFT, ROOT, Draft


def grown(probabilities: list[float], most_tokens: int) -> tuple[Draft, list[int]]:
    """Grow a tree whose tokens have the same children everywhere. Return the draft and the number
    of tokens that each pass read."""
    growth, passes = Growth(most_tokens), []
    children = list(enumerate(probabilities))
    growth.add(ROOT, children)
    while unread := growth.next_unread():
        passes.append(len(unread))
        for node in unread:
            growth.add(node, children)
    return growth.draft(), passes


@pytest.mark.parametrize("most_tokens", [1, 2, 5, 9, 16])
@pytest.mark.parametrize("probabilities", [[0.6, 0.3, 0.1], [0.45, 0.35], [0.3, 0.28, 0.26]])
def test_tree_has_the_likeliest_paths(most_tokens: int, probabilities: list[float]) -> None:
    """The tree consists of the paths with the largest products, best first, and parents precede
    their children."""
    draft, _ = grown(probabilities, most_tokens)
    every = [prod(path) for depth in range(1, 6) for path in product(probabilities, repeat=depth)]
    expected = sorted(every, reverse=True)[:most_tokens]
    found = []
    for place in range(len(draft)):
        path = [place]
        while draft.parent(path[-1]) != ROOT:
            assert draft.parent(path[-1]) < path[-1]
            path.append(draft.parent(path[-1]))
        found.append(prod(probabilities[draft.token_ids[at]] for at in path))
    assert found == pytest.approx(sorted(found, reverse=True))
    # A pass reads few tokens, so the last places may hold slightly worse paths.
    assert sum(found) >= 0.97 * sum(expected)
    assert found[: most_tokens // 2] == pytest.approx(expected[: most_tokens // 2])


def test_confident_model_drafts_a_chain() -> None:
    """Without doubt, the draft is a chain, and each pass reads one token."""
    draft, passes = grown([0.98, 0.01], 6)
    assert draft == Draft((0,) * 6, evidence=980)
    assert passes == [1] * 5


def test_doubtful_model_needs_fewer_passes_than_tokens() -> None:
    """Siblings take the place of deep tokens, so the tree is shallow."""
    draft, passes = grown([0.3, 0.25, 0.2, 0.15], 12)
    assert len(draft) == 12
    assert max(draft.depths) <= 3
    assert len(passes) < 12
    assert max(passes) <= READ_PER_PASS


def test_shares_of_siblings_and_evidence() -> None:
    """Shares of siblings sum to 1, and the evidence is the probability of any first token."""
    draft, _ = grown([0.5, 0.25], 4)
    sums: dict[int, float] = {}
    for parent, share in zip(draft.parents, draft.shares, strict=True):
        sums[parent] = sums.get(parent, 0.0) + share
    assert all(total == pytest.approx(1) for total in sums.values())
    assert draft.evidence == 750


def test_impossible_tokens_are_no_drafts() -> None:
    """Tokens without probability are left out, and a tree without candidates is empty."""
    draft, _ = grown([1.0, 0.0], MAX_TREE_TOKENS)
    assert draft == Draft((0,) * MAX_TREE_TOKENS, evidence=1000)
    assert grown([0.0], 4)[0] == NO_DRAFT
