"""The decoder against transformers, and its rows against themselves."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from backends.core.steps import SequenceWork, StepPlan
from backends.engine.config import read_model_config
from backends.engine.kv_pool import BLOCK_TOKENS, KvPool
from backends.engine.model import Decoder
from backends.engine.runner import Runner
from backends.engine.weights import load_weights
from backends.shipped import SHIPPED_MODEL

SHAPES = {
    "grouped": {"num_attention_heads": 8, "num_key_value_heads": 2},
    "one_kv_head": {"num_attention_heads": 6, "num_key_value_heads": 1, "hidden_size": 96},
    "multi_head_untied": {"num_key_value_heads": 4, "tie_word_embeddings": False},
    "wide_heads": {"head_dim": 48, "num_key_value_heads": 2},
    "long_rope": {"rope_theta": 500000.0, "num_key_value_heads": 2, "num_hidden_layers": 3},
}


class Table:
    """As much of a sequence as the runner looks at."""

    def __init__(self, blocks: list[int]) -> None:
        self.block_table = blocks


def random_checkpoint(directory: Path, **shape: object) -> Path:
    """Save a random Llama."""
    torch.manual_seed(0)
    settings = {
        "vocab_size": 300,
        "hidden_size": 64,
        "intermediate_size": 144,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
        "initializer_range": 0.2,
        **shape,
    }
    LlamaForCausalLM(LlamaConfig(**settings)).save_pretrained(directory)
    return directory


def runner_of(directory: Path, num_blocks: int = 256) -> Runner:
    """A runner in float32."""
    config = read_model_config(directory)
    decoder = Decoder(config, load_weights(directory, config, torch.float32), 2048)
    return Runner(decoder, KvPool(config, num_blocks, torch.float32))


def blocks_of(index: int, tokens: int) -> Table:
    """A run of blocks which no other index has."""
    count = -(-tokens // BLOCK_TOKENS)
    return Table(list(range(index * count, (index + 1) * count)))


def work(table: Table, tokens: list[int], start: int, stop: int) -> SequenceWork:
    """Feed tokens[start:stop] and want the logits of all of them."""
    return SequenceWork(table, start, tuple(tokens[start:stop]), stop - start - 1, samples=True)


def logits_in_steps(runner: Runner, table: Table, tokens: list[int], edges: list[int]):
    """Logits of all tokens, fed in steps between the edges."""
    return torch.cat(
        [runner.logits(StepPlan((work(table, tokens, a, b),))) for a, b in pairwise(edges)]
    )


def check_against_transformers(directory: Path, vocab_size: int) -> None:
    tokens = torch.randint(0, vocab_size, (150,), generator=torch.Generator().manual_seed(1))
    oracle = LlamaForCausalLM.from_pretrained(
        directory, attn_implementation="eager", dtype=torch.float32
    )
    with torch.no_grad():
        expected = oracle(tokens[None]).logits[0]
    steps = [0, 1, 2, 60, 65, 130, 150]
    logits = logits_in_steps(runner_of(directory), blocks_of(0, 150), tokens.tolist(), steps)
    assert (logits - expected).abs().max() < 1e-4
    assert torch.equal(logits.argmax(-1), expected.argmax(-1))


@pytest.mark.parametrize("shape", SHAPES)
def test_logits_are_those_of_transformers(shape: str, tmp_path: Path) -> None:
    """Logits of random Llamas agree with transformers to 1e-4, the argmax exactly."""
    check_against_transformers(random_checkpoint(tmp_path, **SHAPES[shape]), 300)


def test_logits_of_the_shipped_model_are_those_of_transformers() -> None:
    """The shipped checkpoint computes what transformers computes from it."""
    check_against_transformers(SHIPPED_MODEL, read_model_config(SHIPPED_MODEL).vocab_size)


@pytest.fixture(scope="module")
def shipped_runner() -> Runner:
    return runner_of(SHIPPED_MODEL)


@pytest.fixture(scope="module")
def tokens() -> list[int]:
    return torch.randint(0, 4096, (600,), generator=torch.Generator().manual_seed(2)).tolist()


@pytest.fixture(scope="module")
def one_by_one(shipped_runner: Runner, tokens: list[int]) -> torch.Tensor:
    return logits_in_steps(shipped_runner, blocks_of(0, 600), tokens, list(range(601)))


@pytest.mark.parametrize("rows", [1, 5, 16, 33, 40, 160, 512])
def test_a_row_has_the_same_bits_in_steps_of_any_size(
    rows: int, shipped_runner: Runner, tokens: list[int], one_by_one: torch.Tensor
) -> None:
    """A token's logits are bit for bit those it has alone, whatever the size of the step."""
    edges = [*range(0, 600, rows), 600]
    logits = logits_in_steps(shipped_runner, blocks_of(1, 600), tokens, edges)
    assert torch.equal(logits, one_by_one)


def test_a_row_has_the_same_bits_in_a_mixed_batch(
    shipped_runner: Runner, tokens: list[int], one_by_one: torch.Tensor
) -> None:
    """Decodes, verify blocks and prefill chunks in one step do not touch each other's bits."""
    sizes = [1, 3, 17, 64, 100]
    places = [0] * len(sizes)
    while any(place < 600 for place in places):
        parts = [
            work(blocks_of(i + 1, 600), tokens, place, min(place + size, 600))
            for i, (place, size) in enumerate(zip(places, sizes, strict=True))
            if place < 600
        ]
        logits = shipped_runner.logits(StepPlan(tuple(parts)))
        expected = [one_by_one[part.start : part.context_tokens] for part in parts]
        assert torch.equal(logits, torch.cat(expected))
        places = [min(place + size, 600) for place, size in zip(places, sizes, strict=True)]


def test_scattered_blocks_give_the_same_bits(
    shipped_runner: Runner, tokens: list[int], one_by_one: torch.Tensor
) -> None:
    """Keys and values gathered from scattered blocks give what a contiguous view gives."""
    table = Table([(7 * i) % 251 for i in range(38)])
    logits = logits_in_steps(shipped_runner, table, tokens, [*range(0, 600, 7), 600])
    assert torch.equal(logits, one_by_one)
