"""The work of the host for drafts of a GPU, without a GPU."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

pytest.importorskip("triton")

from draftgate.backends.core.proposer import DraftRequest
from draftgate.backends.core.sequence import Sequence
from draftgate.backends.engine.gpu.chains import DeviceChains
from draftgate.backends.engine.gpu.head_passes import HeadPasses
from draftgate.backends.engine.gpu.shapes import Shapes
from draftgate.backends.engine.inputs import Feed
from draftgate.backends.engine.kv_pool import KvPool
from draftgate.backends.types import ResumedChoice
from draftgate.policies.speculation.baselines import Off
from tests.engine.harness import request
from tests.engine.tiny_head import tiny_head
from tests.engine.tiny_model import VOCAB, tiny_config, tiny_weights, tokens_of, triton_decoder
from tests.kernels.device_calls import DeviceCalls, device_calls

CONTEXT = 40


def calls_of_chains(drafts: int, *, captured: bool) -> DeviceCalls:
    """Return the calls for chains of three sequences, of which one has a single draft."""
    config = tiny_config()
    decoder = triton_decoder(config, tiny_weights(config, device="meta"))
    kv = KvPool(config, 16, torch.float32, "meta").draft_layers(config)
    sequences = [
        Sequence.for_choice(
            key, request(str(key), tokens_of(CONTEXT, key), Off(), temperature=key / 2),
            ResumedChoice(0, ()),
        )
        for key in range(3)
    ]  # fmt: skip
    lengths = (drafts, 1, drafts)
    requests = [DraftRequest(*each) for each in zip(sequences, lengths, strict=True)]
    feeds = [
        Feed(sequence.token_ids[-1:], CONTEXT - 1, range(4 * sequence.key, 4 * sequence.key + 4), 1)
        for sequence in sequences
    ]
    with device_calls() as calls:
        chains = DeviceChains(decoder, kv, VOCAB, max_num_seqs=4, max_model_len=64)
        if captured:
            chains.capture()
        calls.launches = calls.copies = 0
        chains.launch(requests, feeds)
    return calls


@pytest.mark.parametrize("drafts", range(1, 5))
def test_chain_is_a_graph_per_draft_between_two_copies_and_one_wait(drafts: int) -> None:
    """The host copies to the GPU twice before the first draft, launches a graph per draft, and
    waits for nothing. All other launches belong to the first draft."""
    calls = calls_of_chains(drafts, captured=True)
    assert calls.copies == 2
    assert calls.replays == drafts
    assert calls.launches == calls_of_chains(1, captured=True).launches


def test_drafts_without_graphs_need_no_copies_either() -> None:
    """Without graphs, each further draft takes the same launches, and neither a copy nor a wait."""
    every = [calls_of_chains(drafts, captured=False) for drafts in range(1, 5)]
    assert {calls.copies for calls in every} == {2}
    assert len({second.launches - first.launches for first, second in pairwise(every)}) == 1


def test_pass_of_a_head_is_a_graph_after_a_copy() -> None:
    """The host copies the input of a pass at once, and waits for nothing."""
    config = tiny_config(num_layers=1, windows=(None,))
    weights = tiny_weights(config, device="meta")
    head = tiny_head(config, weights)
    head._operators = triton_decoder(config, weights).operators
    kv = KvPool(config, 16, torch.float32, "meta").draft_layers(config)
    feeds = [Feed(tokens_of(rows), CONTEXT, range(4), 1) for rows in (1, 2, 1)]
    features = torch.zeros(4, head.features.size, device="meta")
    with device_calls() as calls, torch.inference_mode():
        passes = HeadPasses(head, kv, Shapes(8, 4, 64, kv.page_tokens))
        passes.capture()
        calls.launches = calls.copies = 0
        passes.run(feeds, features)
    assert (calls.copies, calls.replays, calls.launches) == (1, 1, 2)
