"""Logits of every token of a text, computed in steps of any size."""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from pathlib import Path

import torch

from draftgate.backends.checkpoints import SHIPPED_MODEL
from draftgate.backends.core.drafts import Draft
from draftgate.backends.core.steps import SequenceWork, StepPlan
from draftgate.backends.engine.config import read_model_config
from draftgate.backends.engine.kv_pool import BLOCK_TOKENS, KvPool
from draftgate.backends.engine.model import Decoder
from draftgate.backends.engine.runner import Runner
from draftgate.backends.engine.weights import load_weights


class Table:
    """A stand-in for a sequence that has only a block table and the slot of an adapter."""

    def __init__(self, blocks: list[int], adapter_slot: int = 0) -> None:
        self.block_table = blocks
        self.adapter_slot = adapter_slot


def runner_of(directory: Path, num_blocks: int = 256, max_model_len: int = 2048) -> Runner:
    """Load a checkpoint in float32 with its own KV pool."""
    decoder = _load(directory, max_model_len)
    return Runner(decoder, KvPool(decoder.config, num_blocks, torch.float32))


def shipped_runner(num_blocks: int = 256) -> Runner:
    """Return a runner of the shipped model, loaded once for all tests, with its own KV pool."""
    decoder = _shipped()
    return Runner(decoder, KvPool(decoder.config, num_blocks, torch.float32))


@cache
def _shipped() -> Decoder:
    return _load(SHIPPED_MODEL)


def _load(directory: Path, max_model_len: int = 2048) -> Decoder:
    config = read_model_config(directory)
    return Decoder(config, load_weights(directory, config, torch.float32), max_model_len)


def blocks_of(index: int, tokens: int) -> Table:
    """Return consecutive blocks that no other index uses."""
    count = -(-tokens // BLOCK_TOKENS)
    return Table(list(range(index * count, (index + 1) * count)))


def work(table: Table, tokens: list[int], start: int, stop: int) -> SequenceWork:
    """Return the step work that feeds tokens[start:stop] as drafts, so that the step computes all
    their logits."""
    first, *drafts = tokens[start:stop]
    return SequenceWork(table, start, (first,), True, Draft(tuple(drafts)))


def logits_in_steps(
    runner: Runner, table: Table, tokens: list[int], edges: list[int]
) -> torch.Tensor:
    """Return the logits of all tokens, computed in steps between the edges."""
    return torch.cat(
        [runner.logits(StepPlan((work(table, tokens, a, b),))) for a, b in pairwise(edges)]
    )
