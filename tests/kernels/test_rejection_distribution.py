"""Rejection sampling: exact distribution, acceptance and support, and detection of wrong rules."""

from __future__ import annotations

import pytest
import scipy
import torch

from draftgate.backends.engine.kernels import noise, rejection_ref
from draftgate.backends.engine.kernels.rejection_ref import rejection_sample
from draftgate.backends.engine.kernels.sample_verify_ref import RowSampling, sample
from tests.kernels import sampling_cases as cases
from tests.kernels.distributions import (
    ALPHA,
    assert_follows,
    filtered_distribution,
    histogram,
    p_value,
)

_DRAWS = 30_000
_VOCAB = 8
_TARGET = [0.3, 2.0, -1.0, 1.1, 2.0, 0.0, -0.4, 1.7]
_DRAFT = [1.4, 0.9, 0.2, 1.8, 0.1, -0.3, 1.2, 0.6]
_FILTERS = [
    {},
    {"temperature": 0.7, "top_k": 5},
    {"temperature": 1.3, "top_p": 0.8},
    {"min_p": 0.3},
    {"temperature": 1.1, "top_k": 6, "top_p": 0.9, "min_p": 0.2},
    {"top_k": 1},
]


def _exact(logits: list[float], filters: dict[str, float]) -> list[float]:
    return filtered_distribution(logits, **{"temperature": 1.0, **filters})  # type: ignore[arg-type]


def _draw_drafts(probs: list[float], rows: RowSampling) -> torch.Tensor:
    """Sample as a draft model does, with the noise of coupled verification."""
    logits = torch.tensor(probs).log().expand(_DRAWS, -1).contiguous()
    plain = cases.row_sampling(_DRAWS)
    return sample(logits, plain._replace(seed=rows.seed, position=rows.position))


def _drafts_and_tokens(
    draft_probs: list[float], filters: dict[str, float]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the drafts and the tokens of many positions."""
    rows = cases.row_sampling(_DRAWS, seed=4321, **filters)  # type: ignore[arg-type]
    drafts = _draw_drafts(draft_probs, rows)
    logits = torch.tensor(_TARGET).expand(_DRAWS, -1).contiguous()
    probs = torch.tensor(draft_probs).expand(_DRAWS, -1)
    return drafts, rejection_sample(logits, rows, drafts, probs)


def _joint_distribution(target: list[float], draft: list[float]) -> list[float]:
    """Return the exact distribution of (draft, token).

    Accepted drafts are on the diagonal, and rejected drafts follow the residual.
    """
    residual = [max(p - q, 0.0) for p, q in zip(target, draft, strict=True)]
    mass = sum(residual)
    joint = []
    for proposed, (p, q) in enumerate(zip(target, draft, strict=True)):
        rejected = max(q - p, 0.0)
        for token in range(_VOCAB):
            drawn = rejected * residual[token] / mass if rejected else 0.0
            joint.append(min(p, q) + drawn if token == proposed else drawn)
    return joint


def _pairs(drafts: torch.Tensor, tokens: torch.Tensor) -> list[int]:
    return histogram(drafts * _VOCAB + tokens, _VOCAB * _VOCAB)


@pytest.mark.parametrize("filters", _FILTERS, ids=str)
@pytest.mark.parametrize("draft_filters", [{}, {"top_k": 4}, {"temperature": 0.5}], ids=str)
def test_sampled_drafts_and_tokens_have_the_exact_joint_distribution(
    filters: dict[str, float], draft_filters: dict[str, float]
) -> None:
    """Tokens have the target's distribution, and drafts are accepted with min(1, p/q)."""
    target, draft = _exact(_TARGET, filters), _exact(_DRAFT, draft_filters)
    drafts, tokens = _drafts_and_tokens(draft, filters)
    assert_follows(histogram(tokens, _VOCAB), target)
    assert_follows(_pairs(drafts, tokens), _joint_distribution(target, draft))


@pytest.mark.parametrize("filters", _FILTERS, ids=str)
def test_acceptance_rate_is_the_highest_possible(filters: dict[str, float]) -> None:
    """The acceptance rate is sum min(p, q), the upper bound for any rule."""
    target, draft = _exact(_TARGET, filters), _exact(_DRAFT, {"temperature": 0.8})
    drafts, tokens = _drafts_and_tokens(draft, filters)
    best = sum(min(p, q) for p, q in zip(target, draft, strict=True))
    accepted = int((drafts == tokens).sum())
    assert scipy.stats.binomtest(accepted, _DRAWS, best).pvalue > ALPHA


@pytest.mark.parametrize("filters", _FILTERS[:-1], ids=str)
@pytest.mark.parametrize("draft", [1, 2, 3])
def test_one_hot_draft_is_accepted_with_its_probability(
    filters: dict[str, float], draft: int
) -> None:
    """A fixed draft is accepted with p(d), and tokens have the target's distribution."""
    target = _exact(_TARGET, filters)
    one_hot = [float(token == draft) for token in range(_VOCAB)]
    drafts, tokens = _drafts_and_tokens(one_hot, filters)
    assert bool((drafts == draft).all())
    assert_follows(histogram(tokens, _VOCAB), target)


def test_equal_distributions_accept_every_draft() -> None:
    """Only rounding rejects drafts of a draft model that equals the target."""
    drafts, tokens = _drafts_and_tokens(_exact(_TARGET, {}), {})
    assert int((drafts != tokens).sum()) <= 2


@pytest.mark.parametrize("broken", [0.0, torch.nan, torch.inf, 1e-45])
def test_broken_draft_probabilities_never_leave_the_support(broken: float) -> None:
    """Tokens are possible under the target for any draft probabilities, including NaN."""
    filters = {"temperature": 0.9, "top_k": 3}
    target = _exact(_TARGET, filters)
    rows = cases.row_sampling(_DRAWS, seed=5, **filters)  # type: ignore[arg-type]
    drafts = torch.arange(_DRAWS) % _VOCAB
    probs = torch.full((_DRAWS, _VOCAB), broken)
    tokens = rejection_sample(
        torch.tensor(_TARGET).expand(_DRAWS, -1).contiguous(), rows, drafts, probs
    )
    assert all(target[token] > 0 for token in set(tokens.tolist()))


def test_token_of_a_row_does_not_depend_on_the_batch() -> None:
    """A row has the same token alone and in a batch, and the inputs are not modified."""
    rows = cases.mixed_row_sampling(64, seed=3)
    rows = rows._replace(temperature=rows.temperature.clamp(min=0.5))
    logits = cases.random_logits(64, 500, seed=4)
    probs = cases.random_logits(64, 500, seed=5).softmax(dim=1)
    drafts = probs.argmax(dim=1)
    before = logits.clone(), probs.clone()
    together = rejection_sample(logits, rows, drafts, probs)
    assert torch.equal(logits, before[0])
    assert torch.equal(probs, before[1])
    for row in range(64):
        index = torch.tensor([row])
        alone = rejection_sample(logits[index], rows.select(index), drafts[index], probs[index])
        assert torch.equal(alone, together[index])


def _residual_ignored(
    target_probs: torch.Tensor, rows: RowSampling, draft_probs: torch.Tensor
) -> torch.Tensor:
    """Draw from p instead of the residual after a rejection, which is wrong."""
    return _RESIDUAL(target_probs, rows, torch.zeros_like(draft_probs))


def _every_draft_at_p(
    target_probs: torch.Tensor,
    rows: RowSampling,
    draft_tokens: torch.Tensor,
    draft_probs: torch.Tensor,
) -> torch.Tensor:
    """Accept sampled drafts as if they were fixed, which is wrong."""
    return _ACCEPTS(target_probs, rows, draft_tokens, torch.ones_like(draft_probs))


_RESIDUAL = rejection_ref._draw_residual
_ACCEPTS = rejection_ref._accepts


@pytest.mark.parametrize(
    ("owner", "name", "wrong"),
    [
        (rejection_ref, "_draw_residual", _residual_ignored),
        (rejection_ref, "_accepts", _every_draft_at_p),
        (noise, "PURPOSE_RESIDUAL", noise.PURPOSE_OUTPUT),
        (noise, "PURPOSE_ACCEPT", noise.PURPOSE_OUTPUT),
    ],
    ids=["residual from p", "accept at p", "residual reuses noise", "coin reuses noise"],
)
def test_wrong_rule_is_detected(
    monkeypatch: pytest.MonkeyPatch, owner: object, name: str, wrong: object
) -> None:
    """A slightly wrong rule or noise changes the distribution by a wide margin."""
    target, draft = _exact(_TARGET, {}), _exact(_DRAFT, {})
    monkeypatch.setattr(owner, name, wrong)
    _, tokens = _drafts_and_tokens(draft, {})
    assert p_value(histogram(tokens, _VOCAB), target) < 1e-12
