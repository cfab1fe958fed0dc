"""An EAGLE-3 head on the Triton kernels, compared with the torch operators in float32."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import pytest
import torch

from draftgate.backends.core.draft_pages import DraftPages
from draftgate.backends.core.drafts import Draft
from draftgate.backends.core.proposer import DraftRequest, Proposer
from draftgate.backends.core.sequence import Sequence
from draftgate.backends.engine.config import ModelConfig
from draftgate.backends.engine.eagle.head import EagleHead, HeadOutput
from draftgate.backends.engine.gpu.head_passes import HeadPasses
from draftgate.backends.engine.gpu.runner import gpu_runner
from draftgate.backends.engine.gpu.shapes import Shapes
from draftgate.backends.engine.inputs import Feed
from draftgate.backends.engine.kv_pool import DraftLayers, KvPool
from draftgate.backends.engine.model import Decoder
from draftgate.backends.engine.proposers.eagle import EagleProposer, HeadRunner
from draftgate.backends.engine.proposers.trees import grow_trees
from draftgate.backends.engine.runner import Runner
from draftgate.backends.engine.taps import Taps
from draftgate.backends.engine.weights import Weights
from draftgate.backends.types import GenerationRequest, ResumedChoice
from draftgate.policies.protocols import SpeculationPolicy
from draftgate.policies.registry import speculation_policy
from draftgate.policies.speculation.baselines import Off
from draftgate.policies.types import SpeculationMode
from tests.engine.harness import COST, Setup, request
from tests.engine.tiny_head import tiny_head
from tests.engine.tiny_model import (
    TinyEngine,
    cpu_engine,
    tiny_config,
    tiny_weights,
    tokens_of,
    torch_decoder,
    triton_decoder,
)
from tests.kernels.recorded_graphs import recorded_graphs

TOKENS = 20


class Drafted(NamedTuple):
    """The rows of a confirmed text and of a draft after it, and a tree after the text."""

    rows: list[HeadOutput]
    tree: Draft


def head_passes(head: EagleHead, kv: DraftLayers, *, captured: bool = False) -> HeadPasses:
    """Return passes of which those of up to 8 rows may be captured."""
    passes = HeadPasses(head, kv, Shapes(8, 4, 64, kv.page_tokens))
    if captured:
        passes.capture()
    return passes


def drafted(
    make: Callable[[ModelConfig, Weights], Decoder],
    make_passes: Callable[[EagleHead, DraftLayers], HeadPasses] | None = None,
) -> Drafted:
    config = tiny_config(num_layers=1, windows=(None,))
    weights = tiny_weights(config)
    decoder, head = make(config, weights), tiny_head(config, weights)
    head._operators = decoder.operators
    pool = KvPool(config, 4, torch.float32, features=head.features)
    decoder.taps = Taps((0, 1, 1), head.fuse, pool)
    tokens = tokens_of(TOKENS)
    Runner(decoder, pool).forward([Feed(tokens[:-1], 0, [2, 1], num_samples=0)])
    kv = pool.draft_layers(config)
    runner = HeadRunner(head, pool, kv, None if make_passes is None else make_passes(head, kv))
    slots = [32 + place for place in range(16)] + [16, 17, 18]
    found = [runner.read([Feed(tokens[1:], 0, [0, 3], num_samples=1)], slots)]
    token = int(found[0].logits.argmax())
    feed = Feed((token,), TOKENS - 1, [0, 3], num_samples=1)
    found.append(runner.draft([feed], found[0].hidden))
    sequence = Sequence.for_choice(0, request("0", tokens, Off()), ResumedChoice(0, ()))
    (tree,) = grow_trees(
        [DraftRequest(sequence, 6)],
        [Feed(tokens[1:], 0, [0, 3], num_samples=1)],
        kv.page_tokens,
        runner.ragged,
        lambda feeds: runner.read(feeds, slots),
        runner.draft,
        lambda *_: None,
    )
    return Drafted(found, tree)


def test_head_on_triton_equals_the_head_in_torch() -> None:
    """Rows that read features of the target, a draft and a tree are equal on both operators."""
    found, expected = drafted(triton_decoder, head_passes), drafted(torch_decoder)
    for own, wanted in zip(found.rows, expected.rows, strict=True):
        torch.testing.assert_close(own.hidden, wanted.hidden, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(own.logits, wanted.logits, rtol=1e-5, atol=1e-5)
    assert found.tree.token_ids == expected.tree.token_ids
    assert found.tree.parents == expected.tree.parents
    assert found.tree.shares == pytest.approx(expected.tree.shares, rel=1e-4)
    assert max(found.tree.depths) > 1
    assert len(set(found.tree.parents)) < len(found.tree)


def test_captured_passes_have_the_bits_of_separate_launches() -> None:
    """Rows and trees of graphs equal those of separate launches, and long passes need no graph."""
    expected = drafted(triton_decoder, head_passes)
    with recorded_graphs() as graphs:
        found = drafted(triton_decoder, partial(head_passes, captured=True))
    for own, wanted in zip(found.rows, expected.rows, strict=True):
        assert torch.equal(own.hidden, wanted.hidden)
    assert found.tree == expected.tree
    assert sum(graph.replays for graph in graphs) > 1


def test_gpu_runner_drafts_from_a_head_without_changing_a_token() -> None:
    """A worker with the GPU runner and trees of a head generates the tokens of one without drafts,
    greedy and sampled."""
    config = tiny_config(num_layers=1, windows=(None,))
    weights = tiny_weights(config)
    prompts = [tokens_of(18, seed) for seed in range(2)]
    settings = [{"temperature": heat, "seed": 3, "max_tokens": 5} for heat in (0.0, 0.9)]

    def requests(policy: SpeculationPolicy) -> list[GenerationRequest]:
        mode = SpeculationMode.EAGLE
        pairs = zip(prompts, settings, strict=True)
        return [request(str(i), p, policy, mode=mode, **s) for i, (p, s) in enumerate(pairs)]

    decoder, head = triton_decoder(config, weights), tiny_head(config, weights)
    head._operators = decoder.operators
    pool = KvPool(config, 16, torch.float32, features=head.features)
    decoder.taps = Taps((0, 1, 1), head.fuse, pool)

    def proposers(engine: TinyEngine) -> dict[str, Proposer]:
        kv = pool.draft_layers(config)
        runner = HeadRunner(head, pool, kv, head_passes(head, kv))
        pages = DraftPages(engine.blocks, kv.groups, kv.page_tokens, kv.group_pages)
        bounds = {"catch_up_tokens": 64, "cost": COST, "eos_ids": config.eos_ids}
        return {"eagle": EagleProposer(runner, pages, keep_distributions=False, **bounds)}

    policy = speculation_policy("fixed:4")
    setup = Setup(policy, proposers, max_num_seqs=2, num_blocks=16)
    runner = gpu_runner(decoder, pool, max_num_seqs=2, max_model_len=64)
    found = TinyEngine(config, runner, setup).run(requests(policy))
    plain = Setup(Off(), lambda _: {}, max_num_seqs=2, num_blocks=16)
    assert found.tokens == cpu_engine(config, weights, plain).run(requests(Off())).tokens
    assert found.rejected > 0
