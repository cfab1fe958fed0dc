"""The torch sampler: filters, ties, and independence of rows."""

from __future__ import annotations

import math

import pytest
import torch

from draftgate.backends.engine.kernels import noise, sample_verify_ref
from draftgate.backends.engine.kernels.sample_verify_ref import filtered_scores, sample
from tests.kernels import sampling_cases as cases


def _kept(
    logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float
) -> set[int]:
    """Return the tokens that the filters keep, by sorting in double precision."""
    order = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    best = logits[order[0]]
    mass = [math.exp((logits[token] - best) / temperature) for token in order]
    count = top_k if 0 < top_k < len(order) else len(order)
    if top_p < 1:
        target = top_p * math.fsum(mass[:count])
        reached = 0.0
        for length in range(1, count + 1):
            reached += mass[length - 1]
            if reached >= target:
                count = length
                break
    return {token for token, m in zip(order[:count], mass, strict=False) if m >= min_p}


def _kept_by_reference(logits: torch.Tensor, **parameters: float) -> set[int]:
    rows = cases.row_sampling(1, **parameters)  # type: ignore[arg-type]
    scores = filtered_scores(logits[None], rows)[0]
    return set(torch.isfinite(scores).nonzero()[:, 0].tolist())


@pytest.mark.parametrize("vocab", [1, 7, 300, 4096])
@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"),
    [
        (0, 1.0, 0.0),
        (1, 1.0, 0.0),
        (40, 1.0, 0.0),
        (1000, 1.0, 0.0),
        (0, 0.9, 0.0),
        (0, 0.999, 0.0),
        (0, 1e-7, 0.0),
        (40, 0.9, 0.0),
        (1000, 0.97, 0.0),
        (0, 1.0, 0.05),
        (0, 0.95, 0.03),
        (12, 0.8, 0.3),
    ],
)
def test_filters_keep_the_tokens_of_a_plain_sort(
    vocab: int, top_k: int, top_p: float, min_p: float
) -> None:
    """The filters keep the tokens of a plain sort with ties and at any temperature."""
    generator = torch.Generator().manual_seed(vocab)
    for temperature in (0.6, 1.0, 8.0):
        logits = torch.randn(vocab, generator=generator) * 3
        for candidate in (logits, (logits * 2).round() / 2):
            kept = _kept_by_reference(
                candidate, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p
            )
            exact_p = float(torch.tensor(top_p))
            assert kept == _kept(candidate.tolist(), temperature, top_k, exact_p, min_p)


def test_top_p_keeps_the_token_that_crosses_the_threshold() -> None:
    """p = 0.5 keeps the lowest two of four equal tokens, and a slightly larger p keeps three."""
    logits = torch.zeros(4)
    assert _kept_by_reference(logits, top_p=0.5) == {0, 1}
    assert _kept_by_reference(logits, top_p=0.50001) == {0, 1, 2}


def test_top_p_applies_to_the_mass_after_top_k() -> None:
    """p = 0.5 keeps one of the two equal tokens that top-k kept."""
    assert _kept_by_reference(torch.zeros(10), top_k=2, top_p=0.5) == {0}


def test_top_k_one_equals_greedy_for_logits_that_temperature_merges() -> None:
    """top_k = 1 is greedy even if division by T makes neighbouring logits equal."""
    logits = torch.tensor([[1.0, 1.0 + 2.0**-23]])
    assert sample(logits, cases.row_sampling(1, temperature=3.0, top_k=1)).tolist() == [1]
    assert sample(logits, cases.row_sampling(1, temperature=0.0)).tolist() == [1]


def test_greedy_ties_go_to_the_lowest_id() -> None:
    """Greedy rows choose the lowest id among ties, regardless of filters."""
    logits = torch.tensor([[0.0, 2.0, 2.0, 1.0]])
    rows = cases.row_sampling(1, temperature=0.0, top_k=3, top_p=0.1, min_p=1.0)
    assert sample(logits, rows).tolist() == [1]


def test_greedy_rows_draw_no_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sampler draws noise only for rows with a positive temperature."""
    drawn = []

    def spy(seed: torch.Tensor, *arguments: object) -> torch.Tensor:
        drawn.append(seed.shape[0])
        return torch.zeros((seed.shape[0], 8))

    monkeypatch.setattr(sample_verify_ref.noise, "gumbel", spy)
    rows = cases.row_sampling(5)
    rows.temperature[1:4] = 0.0
    sample(torch.zeros((5, 8)), rows)
    sample(torch.zeros((3, 8)), cases.row_sampling(3, temperature=0.0))
    assert drawn == [2]


@pytest.mark.parametrize("vocab", [33, 4096])
def test_token_of_a_row_does_not_depend_on_the_batch(vocab: int) -> None:
    """Every row of a mixed batch has the same token as alone."""
    rows = cases.mixed_row_sampling(40, seed=11)
    logits = cases.random_logits(40, vocab, seed=11)
    together = sample(logits, rows).tolist()
    for row in range(40):
        index = torch.tensor([row])
        assert sample(logits[index], rows.select(index)).tolist() == [together[row]]


def test_token_is_the_argmax_under_the_output_noise() -> None:
    """The unfiltered token is argmax(logits / T + g), with g drawn for purpose 0."""
    logits = torch.randn((50, 64), generator=torch.Generator().manual_seed(6))
    rows = cases.row_sampling(50, temperature=0.7, seed=31, first_position=1000)
    gumbel = noise.gumbel(rows.seed, rows.choice, rows.position, 0, 64)
    assert sample(logits, rows).tolist() == (logits / 0.7 + gumbel).argmax(dim=1).tolist()


def test_sampling_does_not_modify_logits() -> None:
    """Sampling keeps the logits, which log probabilities read afterwards."""
    logits = cases.random_logits(10, 300, seed=4)
    before = logits.clone()
    sample(logits, cases.mixed_row_sampling(10, seed=4))
    assert torch.equal(logits, before)


def test_forbidden_tokens_are_never_sampled() -> None:
    """The sampler never draws a token at -inf, at any temperature and with any filters."""
    rows = cases.mixed_row_sampling(60, seed=12)
    logits = torch.full((60, 50), -torch.inf)
    logits[:, 17] = -30.0
    logits[:, 31] = -31.0
    assert set(sample(logits, rows).tolist()) <= {17, 31}


def test_no_rows_give_no_tokens() -> None:
    """An empty batch gives no tokens."""
    rows = cases.row_sampling(0)
    assert sample(torch.empty((0, 16)), rows).shape == (0,)
