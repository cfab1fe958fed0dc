"""Training of EAGLE-3 heads: unrolled drafts, the loss, and the written checkpoint."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

from transformers import LlamaForCausalLM

from draftgate.backends.checkpoints import SHIPPED_MODEL
from draftgate.backends.engine.config import read_model_config
from draftgate.backends.engine.eagle.config import check_target, read_head_config
from draftgate.backends.engine.eagle.weights import load_head_weights
from draftgate.backends.engine.weights import load_weights
from tests.engine.eagle_heads import ReferenceHead
from training import eagle
from training.recipes import HEAD
from training.train import build_optimizers

RECIPE = replace(HEAD, inner=32, draft_vocab_size=300, taps=(1, 3, 6), matrix_rate=0.02)


@pytest.fixture(scope="module")
def target() -> object:
    """The frozen target."""
    model = LlamaForCausalLM.from_pretrained(SHIPPED_MODEL, dtype=torch.float32)
    return model.eval().requires_grad_(requires_grad=False)


@pytest.fixture
def head(target) -> eagle.Head:
    """A head whose layer and fusion are random."""
    head = eagle.build_head(target, RECIPE, torch.arange(0, 4096, 13)[:300])
    for parameter in head.midlayer.parameters():
        if parameter.ndim == 2:
            torch.nn.init.normal_(parameter, std=0.05)
    return head


def test_unrolled_depths_are_the_drafts_of_the_head(target, head: eagle.Head) -> None:
    """Depth s of chain i has the hidden state of a head that read the confirmed tokens up to i + 1
    and then s tokens with its own hidden states."""
    ids = torch.randint(1, 4096, (1, 12), generator=torch.Generator().manual_seed(1))
    tapped = eagle.tap(target, ids, RECIPE.taps)
    with torch.no_grad():
        unrolled = list(head.unroll(tapped.embedded, tapped.states.float(), 3))
        tensors = dict(head.named_parameters())
        reference = ReferenceHead(tensors, target.model.embed_tokens.weight)
        features = reference.features([tapped.states[0].float()])
        tokens = ids[0].tolist()
        for chain in (0, 4, 7):
            fed, rows = tokens[1 : chain + 2], features[: chain + 1]
            for depth in range(3):
                hidden, _ = reference.rows(fed, rows)
                expected = torch.nn.functional.rms_norm(
                    hidden[-1], hidden.shape[-1:], tensors["norm.weight"], 1e-5
                )
                torch.testing.assert_close(
                    unrolled[depth][0, chain], expected, atol=1e-4, rtol=1e-4
                )
                fed = [*fed, tokens[chain + 2 + depth]]
                rows = torch.cat([rows, hidden[-1:]])


def losses(target, head: eagle.Head, ids: Tensor) -> list[Tensor]:
    return eagle.depth_losses(head, target, ids, RECIPE)


def test_updates_bring_the_head_closer_to_the_target(target, head: eagle.Head) -> None:
    """A few updates on one batch lower the loss at every depth, and leave the target as it was."""
    before = target.model.embed_tokens.weight.clone()
    ids = torch.randint(1, 4096, (4, 33), generator=torch.Generator().manual_seed(2))
    hidden = (head.fc.weight, *head.midlayer.parameters())
    optimizers = build_optimizers(head, hidden, RECIPE.matrix_rate, RECIPE.other_rate)
    found = []
    for _ in range(8):
        found.append([loss.item() for loss in losses(target, head, ids)])
        torch.stack(losses(target, head, ids)).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert all(last < first for first, last in zip(found[0], found[-1], strict=True))
    assert torch.equal(before, target.model.embed_tokens.weight)


def test_written_head_loads_in_the_engine(target, head: eagle.Head, tmp_path: Path) -> None:
    """The checkpoint has the trained weights in bfloat16, the taps and the table of tokens."""
    eagle.save_head(head, target.config, RECIPE, tmp_path)
    model = read_model_config(SHIPPED_MODEL)
    config = read_head_config(tmp_path)
    check_target(config, model, tmp_path)
    assert config.taps_of(model) == RECIPE.taps
    weights = load_head_weights(
        tmp_path, config, load_weights(SHIPPED_MODEL, model, torch.float32), torch.float32
    )
    assert torch.equal(weights.token_ids, head.token_ids)
    assert torch.equal(weights.final_norm, head.norm.weight.detach().bfloat16().float())
    x = torch.randn(4, 3 * 256)
    fused = torch.nn.functional.linear(x, head.fc.weight.detach().bfloat16().float())
    torch.testing.assert_close(weights.fuse(x), fused, atol=1e-4, rtol=1e-4)


def test_most_frequent_tokens_are_chosen() -> None:
    """The head's tokens are the most frequent ones, in ascending order."""
    texts = [torch.tensor([5, 5, 1]).numpy(), torch.tensor([9, 1, 5, 3]).numpy()]
    assert eagle.frequent_tokens(texts, 12, 2).tolist() == [1, 5]
