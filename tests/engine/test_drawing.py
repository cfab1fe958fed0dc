"""Random tokens in C, which must equal those of the definition in every row."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from draftgate.backends.engine.kernels import noise, sample_verify_ref
from draftgate.backends.engine.kernels.sample_verify_ref import RowSampling
from draftgate.backends.engine.operators import drawing
from draftgate.backends.engine.operators.compiler import compiler_version
from tests.examples import examples

pytestmark = pytest.mark.skipif(compiler_version() is None, reason="needs gcc")

ROWS = 4


def random_rows(seed: int, temperature: float, **filters: float) -> RowSampling:
    """Return the parameters of `ROWS` rows with different seeds, choices and positions."""
    random = torch.Generator().manual_seed(seed)

    def integers(most: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.randint(0, most, (ROWS,), generator=random, dtype=dtype)

    def every(value: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.full((ROWS,), value, dtype=dtype)

    return RowSampling(
        every(temperature),
        every(filters.get("top_k", 0), torch.int32),
        every(filters.get("top_p", 1.0)),
        every(filters.get("min_p", 0.0)),
        integers(2**62, torch.int64) - 2**61,
        integers(128),
        integers(2**20),
    )


def random_logits(seed: int, vocab: int, scale: float) -> torch.Tensor:
    return scale * torch.randn(ROWS, vocab, generator=torch.Generator().manual_seed(seed))


@given(
    seed=st.integers(0, 2**31),
    vocab=st.one_of(st.integers(1, 130), st.integers(1, 3000)),
    scale=st.sampled_from([0.0, 0.1, 1.0, 10.0, 1e4]),
    temperature=st.sampled_from([1e-30, 1e-3, 0.3, 1.0, 2.0, 1e30]),
    forbidden=st.sampled_from([0.0, 0.5, 1.0]),
    filters=st.sampled_from([{}, {"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}]),
)
@settings(max_examples=examples(150), deadline=None)
def test_tokens_equal_those_of_the_definition(
    seed: int,
    vocab: int,
    scale: float,
    temperature: float,
    forbidden: float,
    filters: dict[str, float],
) -> None:
    """For any vocabulary, temperature, filters and forbidden tokens, C draws the same tokens."""
    logits = random_logits(seed, vocab, scale)
    out = torch.rand(logits.shape, generator=torch.Generator().manual_seed(seed + 1)) < forbidden
    if not filters:  # which need a token that is allowed
        logits.masked_fill_(out, -torch.inf)
    rows = random_rows(seed, temperature, **filters)
    assert drawing.draw(logits, rows).tolist() == sample_verify_ref.draw(logits, rows).tolist()


@pytest.mark.parametrize("vocab", [2, 33, 1000])
def test_rows_that_rounding_decides_equal_the_definition(vocab: int) -> None:
    """If every token has the same score up to rounding, the tokens are those of the definition."""
    rows = random_rows(3, 1.0)
    noise_of_row = noise.gumbel(rows.seed, rows.choice, rows.position, noise.PURPOSE_OUTPUT, vocab)
    logits = 5.0 - noise_of_row
    assert drawing.draw(logits, rows).tolist() == sample_verify_ref.draw(logits, rows).tolist()


def test_most_rows_need_no_definition(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ordinary rows are drawn in C alone, whatever their vocabulary."""

    def fail(*_: object) -> torch.Tensor:
        raise AssertionError("the definition was called")

    monkeypatch.setattr(sample_verify_ref, "draw", fail)
    for seed in range(8):
        tokens = drawing.draw(random_logits(seed, 777, 4.0), random_rows(seed, 0.7))
        assert ((tokens >= 0) & (tokens < 777)).all()


def test_largest_noise_is_within_the_bound_of_skipped_blocks() -> None:
    """The largest noise that a token can have is below the bound with which C skips tokens."""
    u = torch.tensor([(2**23 - 0.5) / 2**23])
    assert 16.6 < float(-torch.log(-torch.log(u))) < 16.65
