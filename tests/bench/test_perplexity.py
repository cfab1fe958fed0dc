"""The benchmark of perplexity."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn import functional

from bench.engine.bound import cpu_config
from bench.engine.perplexity import CHUNK_TOKENS, chunk_losses, chunks_of
from draftgate.backends.checkpoints import SHIPPED_MODEL, SHIPPED_MODEL_ID
from tests.engine.harness import Model
from tests.engine.step_logits import blocks_of, logits_in_steps

TEXT = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text("utf-8")


def test_a_loss_is_that_of_the_second_half_of_a_chunk() -> None:
    """Each chunk has 255 counted tokens, whose probabilities depend on the whole chunk."""
    model = Model(SHIPPED_MODEL)
    (tokens,) = chunks_of(model.tokenizer.encode(TEXT), model.tokenizer.encode(""))[:1]
    logits = logits_in_steps(model.runner(40), blocks_of(0, CHUNK_TOKENS), tokens, [0, 512])
    expected = functional.cross_entropy(logits[256:511], torch.tensor(tokens[257:]))
    config = cpu_config(SHIPPED_MODEL_ID, 1, dtype="float32")
    assert chunk_losses(config, TEXT, 1) == [pytest.approx(expected.item(), abs=1e-4)]


def test_chunks_begin_with_the_bos_token() -> None:
    """The token replaces the first one of each chunk, and incomplete chunks do not count."""
    tokens = list(range(1100))
    assert chunks_of(tokens, []) == [tokens[:512], tokens[512:1024]]
    assert chunks_of(tokens, [-1]) == [[-1, *tokens[1:512]], [-1, *tokens[513:1024]]]
