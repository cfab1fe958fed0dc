"""Sampled tokens, compared with exact probabilities by chi-square tests with fixed seeds."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import scipy
import torch

from draftgate.backends.engine.kernels.accept_walk_ref import NO_DRAFT, accept_walk
from draftgate.backends.engine.kernels.sample_verify_ref import sample
from tests.kernels import sampling_cases as cases
from tests.kernels.distributions import ALPHA, assert_follows, filtered_distribution, histogram
from tests.kernels.walk_cases import never_stop

_DRAWS = 20_000
_VOCAB = 12
_LOGITS = torch.tensor([0.3, 2.0, -1.0, 1.1, 2.0, 0.0, -2.0, 1.7, 0.9, 2.6, -0.5, 1.1])


@pytest.mark.parametrize("temperature", [0.7, 1.0, 2.0])
@pytest.mark.parametrize(
    "filters",
    [
        {},
        {"top_k": 1},
        {"top_k": 2},
        {"top_k": 5},
        {"top_p": 0.8},
        {"top_p": 0.01},
        {"min_p": 0.2},
        {"top_k": 5, "top_p": 0.7},
        {"top_k": 6, "min_p": 0.3},
        {"top_p": 0.9, "min_p": 0.3},
        {"top_k": 7, "top_p": 0.9, "min_p": 0.25},
    ],
    ids=str,
)
def test_tokens_have_the_filtered_distribution(
    temperature: float, filters: dict[str, float]
) -> None:
    """Sampled tokens have the exact distribution for every combination of filters."""
    rows = cases.row_sampling(_DRAWS, temperature=temperature, seed=1234, **filters)  # type: ignore[arg-type]
    tokens = sample(_LOGITS.expand(_DRAWS, -1).contiguous(), rows)
    assert_follows(
        histogram(tokens, _VOCAB), filtered_distribution(_LOGITS.tolist(), temperature, **filters)
    )  # type: ignore[arg-type]


@pytest.mark.parametrize("varied", ["seed", "choice", "position"])
def test_noise_is_independent_along_every_coordinate(varied: str) -> None:
    """Neighbouring tokens are independent along seeds, choices and positions."""
    rows = cases.row_sampling(_DRAWS, seed=99)
    index = torch.arange(_DRAWS)
    coordinates = {"seed": rows.seed, "choice": rows.choice, "position": rows.position}
    for name, tensor in coordinates.items():
        tensor.copy_(index if name == varied else torch.full_like(index, 7))
    tokens = sample(_LOGITS.expand(_DRAWS, -1).contiguous(), rows)
    exact = filtered_distribution(_LOGITS.tolist(), 1.0)
    # Pairs of the rarest tokens share a cell, so that all cells are large enough.
    common = [token for token in range(_VOCAB) if exact[token] > 0.04]
    cell = torch.full((_VOCAB,), len(common))
    cell[common] = torch.arange(len(common))
    marginal = [exact[token] for token in common]
    marginal.append(1 - math.fsum(marginal))
    side = len(marginal)
    pairs = cell[tokens[0::2]] * side + cell[tokens[1::2]]
    joint = [first * second for first in marginal for second in marginal]
    assert_follows(histogram(pairs, side * side), joint)


_STATES = 4
_LENGTH = 3
_FIRST_POSITION = 17
# A Markov model of four tokens, with logits of the next token (column) by previous token (row).
_MARKOV = torch.tensor(
    [[0.0, 1.0, 0.5, -0.5], [1.5, 0.0, 0.0, 0.7], [0.2, 0.4, 1.2, 0.0], [-0.3, 0.9, 0.1, 0.8]]
)
_DRAFT_MODEL = _MARKOV.roll(1, dims=1) * 0.5 + _MARKOV
_START = 2
_TEMPERATURE = 0.8

Drafter = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""A function of (seeds, positions, previous tokens) that returns draft tokens."""


def _draw(
    model: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor, previous: torch.Tensor
) -> torch.Tensor:
    """Sample the next token of every row from a Markov model with the request's noise."""
    rows = cases.row_sampling(seeds.shape[0], temperature=_TEMPERATURE)
    rows = rows._replace(seed=seeds, position=positions.to(torch.int32))
    return sample(model[previous], rows)


def _draft_constant(
    seeds: torch.Tensor, positions: torch.Tensor, previous: torch.Tensor
) -> torch.Tensor:
    return torch.ones_like(previous)


def _draft_greedy(
    seeds: torch.Tensor, positions: torch.Tensor, previous: torch.Tensor
) -> torch.Tensor:
    return _MARKOV[previous].argmax(dim=1)


def _draft_same_noise(
    seeds: torch.Tensor, positions: torch.Tensor, previous: torch.Tensor
) -> torch.Tensor:
    return _draw(_DRAFT_MODEL, seeds, positions, previous)


def _generate(seeds: torch.Tensor, max_drafts: int, drafter: Drafter) -> torch.Tensor:
    """Generate three tokens per seed by draft and verify steps, as int64 [seeds, 3].

    Sequence i drafts ``i % (max_drafts + 1)`` tokens per step, so batches are ragged.
    """
    count = seeds.shape[0]
    text = torch.full((count, 1 + _LENGTH + max_drafts), NO_DRAFT)
    text[:, 0] = _START
    done = torch.zeros(count, dtype=torch.int64)
    while bool((done < _LENGTH).any()):
        active = (done < _LENGTH).nonzero()[:, 0]
        lengths = active % (max_drafts + 1) + 1
        bounds = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        owner = torch.repeat_interleave(torch.arange(active.shape[0]), lengths)
        slot = torch.arange(owner.shape[0]) - bounds[owner]
        sequence = active[owner]
        previous = torch.empty_like(slot)
        token = text[active, done[active]]
        for depth in range(max_drafts + 1):
            at_depth = slot == depth
            previous[at_depth] = token[owner[at_depth]]
            position = _FIRST_POSITION + done[active] + depth
            token = drafter(seeds[active], position, token)
        positions = _FIRST_POSITION + done[sequence] + slot
        sampled = _draw(_MARKOV, seeds[sequence], positions, previous)
        walked = accept_walk(
            sampled,
            torch.where(slot > 0, previous, NO_DRAFT),
            (slot - 1).to(torch.int32),
            bounds.to(torch.int32),
            never_stop(active.shape[0]),
            max_rows=max_drafts + 1,
        )
        kept = walked.emitted != NO_DRAFT
        text[sequence[kept], done[sequence[kept]] + slot[kept] + 1] = walked.emitted[kept]
        done[active] += walked.num_emitted
    return text[:, 1 : 1 + _LENGTH]


def _joint_distribution() -> list[float]:
    """Return the exact distribution of three tokens of the Markov model."""
    step = (_MARKOV.to(torch.float64) / _TEMPERATURE).softmax(dim=1)
    joint = step[_START][:, None, None] * step[:, :, None] * step[None, :, :]
    return [float(probability) for probability in joint.reshape(-1)]


@pytest.mark.parametrize("drafter", [_draft_constant, _draft_greedy, _draft_same_noise])
def test_speculation_keeps_the_joint_distribution(drafter: Drafter) -> None:
    """Three tokens generated with drafts have the exact joint distribution of the model."""
    seeds = torch.arange(_DRAWS) * 0x1E3779B97F4A7C15
    text = _generate(seeds, 3, drafter)
    cells = (text[:, 0] * _STATES + text[:, 1]) * _STATES + text[:, 2]
    assert_follows(histogram(cells, _STATES**3), _joint_distribution())


def test_text_does_not_depend_on_the_drafter() -> None:
    """Every drafter and draft length gives the same tokens for a seed."""
    seeds = torch.arange(2000) + 5
    plain = _generate(seeds, 0, _draft_constant)
    for drafter in (_draft_constant, _draft_greedy, _draft_same_noise):
        for max_drafts in (1, 3):
            assert torch.equal(_generate(seeds, max_drafts, drafter), plain)


def test_one_hot_draft_is_accepted_with_its_probability() -> None:
    """The sampler accepts a proposed token with the probability of the token under the model."""
    seeds = torch.arange(_DRAWS) + 77
    positions = torch.full((_DRAWS,), _FIRST_POSITION)
    sampled = _draw(_MARKOV, seeds, positions, torch.full((_DRAWS,), _START))
    exact = (_MARKOV[_START].to(torch.float64) / _TEMPERATURE).softmax(dim=0)
    for draft in range(_STATES):
        hits = int((sampled == draft).sum())
        assert scipy.stats.binomtest(hits, _DRAWS, float(exact[draft])).pvalue > ALPHA
