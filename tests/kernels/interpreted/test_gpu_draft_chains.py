"""Chains of a draft model on the Triton kernels, compared with chains that the host extends."""

from __future__ import annotations

import pytest
import torch

from draftgate.backends.core.draft_pages import DraftPages
from draftgate.backends.core.proposer import Proposer
from draftgate.backends.engine.gpu.runner import gpu_runner
from draftgate.backends.engine.kv_pool import KvPool
from draftgate.backends.engine.proposers.draft_model import DraftModel, DraftModelProposer
from draftgate.backends.types import GenerationRequest
from draftgate.policies.protocols import SpeculationPolicy
from draftgate.policies.registry import speculation_policy
from draftgate.policies.speculation.baselines import Off
from draftgate.policies.types import SpeculationMode
from tests.engine.harness import COST, Setup, request
from tests.engine.tiny_drafter import COMMON, TinyDrafter, in_graphs, on_the_device
from tests.engine.tiny_model import (
    VOCAB,
    TinyEngine,
    cpu_engine,
    tiny_config,
    tiny_weights,
    tokens_of,
    torch_decoder,
    triton_decoder,
)
from tests.kernels.recorded_graphs import recorded_graphs


@pytest.mark.parametrize("vocab", [COMMON, VOCAB + 3])
def test_device_draws_the_chains_of_the_host(vocab: int) -> None:
    """Chains of unequal lengths have the tokens and the evidence of chains that the host extends,
    also if the vocabularies have different padding."""
    config = tiny_config(num_layers=1, windows=(24,), vocab_size=vocab)
    weights = tiny_weights(config)
    found = TinyDrafter(triton_decoder(config, weights), on_the_device).run()
    assert found == TinyDrafter(triton_decoder(config, weights)).run()
    reference = TinyDrafter(torch_decoder(config, weights)).run()
    assert [draft.token_ids for draft in found] == [draft.token_ids for draft in reference]
    assert len({len(draft) for draft in found}) > 2
    assert all(draft.evidence for draft in found)


def test_captured_passes_draw_the_chains_of_the_host() -> None:
    """A graph of one pass, replayed for each further draft, gives the chains of the host."""
    config = tiny_config(num_layers=1, windows=(None,))
    weights = tiny_weights(config)
    with recorded_graphs():
        drafter = TinyDrafter(triton_decoder(config, weights), in_graphs)
        assert drafter.run() == TinyDrafter(triton_decoder(config, weights)).run()
    assert drafter.chains is not None
    graphs = drafter.chains._next._graphs.values()
    assert sum(graph.replays for graph, _ in graphs) == drafter.further_passes > 0


def test_gpu_runner_drafts_from_a_draft_model_without_changing_a_token() -> None:
    """A worker with the GPU runner generates the tokens of one without drafts, first with chains
    of the host, because a request has a penalty, and then with chains of the device."""
    config = tiny_config(num_layers=1, windows=(None,))
    weights = tiny_weights(config)
    decoder, pool = triton_decoder(config, weights), KvPool(config, 16, torch.float32)

    def requests(policy: SpeculationPolicy) -> list[GenerationRequest]:
        samplings = ({"temperature": 0.0}, {"temperature": 0.9, "seed": 3}, {"presence_penalty": 1})
        return [
            request(
                str(index), tokens_of(18, index), policy, mode=SpeculationMode.DRAFT_MODEL,
                max_tokens=8 - 3 * index, **sampling,
            )
            for index, sampling in enumerate(samplings)
        ]  # fmt: skip

    def proposers(engine: TinyEngine) -> dict[str, Proposer]:
        # The draft model is the target, so that drafts of greedy requests are accepted.
        kv = pool.draft_layers(config)
        pages = DraftPages(engine.blocks, kv.groups, kv.page_tokens, kv.group_pages)
        chains = on_the_device(decoder, kv)
        draw = chains.draw
        chains.draw = lambda requests, *more: drawn.append(len(requests)) or draw(requests, *more)
        model = DraftModel(decoder, kv, VOCAB, chains)
        bounds = {"catch_up_tokens": 64, "cost": COST, "eos_ids": config.eos_ids}
        return {"draft_model": DraftModelProposer(model, pages, keep_distributions=False, **bounds)}

    drawn: list[int] = []
    policy = speculation_policy("fixed:3")
    runner = gpu_runner(decoder, pool, max_num_seqs=3, max_model_len=64)
    setup = Setup(policy, proposers, max_num_seqs=3, num_blocks=16)
    found = TinyEngine(config, runner, setup).run(requests(policy))
    plain = Setup(Off(), lambda _: {}, max_num_seqs=3, num_blocks=16)
    assert found.tokens == cpu_engine(config, weights, plain).run(requests(Off())).tokens
    assert found.accepted > 0
    assert 0 < max(drawn) < 3
