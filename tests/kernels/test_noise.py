"""Noise: golden vectors, known results of the generator, and independence of rows."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch

from draftgate.backends.engine.kernels import noise

# (seed, choice, position, purpose, token, word, u, g), from the specification of the noise.
_GOLDEN = [
    (0, 0, 0, 0, 0, 0x6627E8D5, 0.39904648065567017, 0.08482028),
    (0, 0, 0, 0, 3, 0x9B00DBD8, 0.6054818034172058, 0.68969162),
    (7, 0, 12, 0, 4095, 0xD773BACA, 0.8416096568107605, 1.75771194),
    (7, 1, 12, 0, 4095, 0x6E67AF38, 0.4312695860862732, 0.17313759),
    (0x123456789ABCDEF0, 2, 100000, 1, 151935, 0x76F06804, 0.4646058678627014, 0.26583470),
]

# Random123, tests/kat_vectors, philox4x32 with 10 rounds: counter, key, output.
_KNOWN_ANSWERS = [
    ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    (
        [0xFFFFFFFF] * 4,
        [0xFFFFFFFF] * 2,
        [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD],
    ),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]


def _row(seed: int, choice: int, position: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return (
        torch.tensor([seed]),
        torch.tensor([choice], dtype=torch.int32),
        torch.tensor([position], dtype=torch.int32),
    )


def _rows(count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(count)
    return (
        torch.randint(-(2**63), 2**63 - 1, (count,), generator=generator),
        torch.randint(5, (count,), generator=generator, dtype=torch.int32),
        torch.randint(1 << 20, (count,), generator=generator, dtype=torch.int32),
    )


@pytest.mark.parametrize(
    ("seed", "choice", "position", "purpose", "token", "word", "u", "g"), _GOLDEN
)
def test_noise_equals_the_golden_vectors(
    seed: int, choice: int, position: int, purpose: int, token: int, word: int, u: float, g: float
) -> None:
    """Words and uniforms equal version 1 of the noise, and Gumbel noise is equal up to rounding."""
    arguments = (*_row(seed, choice, position), purpose, token + 1)
    assert int(noise.philox_words(*arguments)[0, token]) == word
    assert float(noise.uniform(*arguments)[0, token]) == u
    assert float(noise.gumbel(*arguments)[0, token]) == pytest.approx(g, abs=1e-7, rel=2e-7)


@pytest.mark.parametrize(("counter", "key", "expected"), _KNOWN_ANSWERS)
def test_generator_equals_the_vectors_of_random123(
    counter: list[int], key: list[int], expected: list[int]
) -> None:
    """The generator equals the published Philox4x32-10."""
    seed = np.array([key[0] | key[1] << 32], dtype=np.uint64)
    keys = noise._key_schedule(seed, np.zeros(1, dtype=np.uint64))
    state = np.array(counter, dtype=np.uint64).reshape(4, 1, 1)
    words = noise._philox_rounds(keys, state[0::2].copy(), state[1::2].copy())
    assert words.ravel().tolist() == expected


@pytest.mark.parametrize("num_tokens", [1, 2, 5, 4096, 33001])
def test_torch_operations_draw_the_same_words(num_tokens: int) -> None:
    """The path for other devices equals the CPU path exactly."""
    arguments = (*_rows(9), noise.PURPOSE_RESIDUAL, num_tokens)
    expected = noise.philox_words(*arguments)
    assert torch.equal(noise._philox_words_torch(*arguments), expected)


def test_uniform_and_gumbel_follow_from_the_words() -> None:
    """u is ((word >> 9) + 0.5) / 2**23 exactly, and g is -log(-log u) up to rounding."""
    arguments = (*_rows(3), noise.PURPOSE_OUTPUT, 5000)
    words = noise.philox_words(*arguments)
    u = ((words >> 9).to(torch.float64) + 0.5) / 2**23
    assert torch.equal(noise.uniform(*arguments).to(torch.float64), u)
    g = -torch.log(-torch.log(u))
    torch.testing.assert_close(noise.gumbel(*arguments).to(torch.float64), g, rtol=3e-7, atol=3e-7)


def test_extreme_words_give_finite_noise() -> None:
    """The smallest and the largest word give finite Gumbel noise, because 0 < u < 1."""
    words = np.array([0, 2**32 - 1], dtype=np.uint64)
    u = noise._uniform_of_words(words)
    assert u.tolist() == [2.0**-24, 1 - 2.0**-24]
    assert np.isfinite(noise._gumbel_of_uniform(u)).all()


@pytest.mark.parametrize("num_tokens", [7, 4096, 40000])
def test_noise_of_a_row_does_not_depend_on_the_batch(num_tokens: int) -> None:
    """A row has the same bits alone and in a batch, also at the ends of blocks."""
    seeds, choices, positions = _rows(19)
    together = noise.gumbel(seeds, choices, positions, noise.PURPOSE_OUTPUT, num_tokens)
    for row in (0, 7, 8, 18):
        one = slice(row, row + 1)
        alone = noise.gumbel(
            seeds[one], choices[one], positions[one], noise.PURPOSE_OUTPUT, num_tokens
        )
        assert torch.equal(alone[0], together[row])


def test_noise_of_a_smaller_vocabulary_is_a_prefix() -> None:
    """A draft model with a smaller vocabulary has the same noise for the same tokens."""
    rows = _rows(2)
    long = noise.gumbel(*rows, noise.PURPOSE_OUTPUT, 1000)
    assert torch.equal(noise.gumbel(*rows, noise.PURPOSE_OUTPUT, 333), long[:, :333])


def test_no_rows_give_no_noise() -> None:
    """An empty batch gives empty noise."""
    empty = torch.empty(0, dtype=torch.int64)
    assert noise.gumbel(empty, empty, empty, noise.PURPOSE_OUTPUT, 8).shape == (0, 8)


def test_references_import_without_triton() -> None:
    """The references import on a machine without Triton."""
    code = (
        "import sys\n"
        "sys.modules['triton'] = None\n"
        "from draftgate.backends.engine.kernels import noise, paged_attention_ref\n"
        "from draftgate.backends.engine.kernels import sample_verify_ref\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_kernels_import_without_a_driver() -> None:
    """The Triton modules import without a GPU driver."""
    pytest.importorskip("triton")
    code = (
        "from triton.runtime import driver\n"
        "def refuse(self): raise AssertionError('the driver was used')\n"
        "type(driver).active = property(refuse)\n"
        "from draftgate.backends.engine.kernels import noise_triton, paged_attention\n"
        "from draftgate.backends.engine.kernels import sample_verify\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
