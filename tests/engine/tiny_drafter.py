"""A tiny draft model that drafts for sequences of changing lengths, on any device."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from draftgate.backends.core.draft_pages import DraftPages
from draftgate.backends.core.drafts import Draft
from draftgate.backends.core.kv_blocks import KvBlocks
from draftgate.backends.core.proposer import DraftRequest
from draftgate.backends.core.sequence import Sequence
from draftgate.backends.engine.kv_pool import BLOCK_TOKENS, DraftLayers, KvPool
from draftgate.backends.engine.model import Decoder
from draftgate.backends.engine.proposers.draft_model import DraftModel, DraftModelProposer
from draftgate.backends.types import ResumedChoice
from draftgate.policies.speculation.baselines import Off
from tests.engine.harness import COST, request
from tests.engine.tiny_model import POSITIONS, VOCAB, tiny_config, tokens_of

if TYPE_CHECKING:
    from draftgate.backends.engine.gpu.chains import DeviceChains

COMMON = VOCAB - 3
"""Tokens of the target's vocabulary and of all draft models."""

BLOCKS = 40

SAMPLINGS = (
    {"temperature": 0.0},
    {"temperature": 0.9, "seed": 5},
    {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "seed": 6},
    {"temperature": 1.2, "logprobs": 2, "seed": 7},
)

MakeChains = Callable[[Decoder, DraftLayers], "DeviceChains | None"]


def by_the_host(decoder: Decoder, kv: DraftLayers) -> None:
    """Extend chains on the host."""


def on_the_device(decoder: Decoder, kv: DraftLayers) -> DeviceChains:
    """Return chains whose passes are launched kernel by kernel."""
    from draftgate.backends.engine.gpu.chains import DeviceChains

    return DeviceChains(decoder, kv, VOCAB, max_num_seqs=5, max_model_len=POSITIONS)


def in_graphs(decoder: Decoder, kv: DraftLayers) -> DeviceChains:
    """Return chains whose passes are captured."""
    chains = on_the_device(decoder, kv)
    chains.capture()
    return chains


class TinyDrafter:
    """A draft model proposer with its own pool, and a sequence for each sampling.

    Attributes:
        further_passes: number of passes after the first ones of all chains.
    """

    def __init__(self, decoder: Decoder, make_chains: MakeChains = by_the_host) -> None:
        target = tiny_config()
        pool = KvPool(target, BLOCKS, torch.float32, decoder.device)
        kv = pool.draft_layers(decoder.config)
        self.chains = make_chains(decoder, kv)
        self.further_passes = 0
        self._proposer = DraftModelProposer(
            DraftModel(decoder, kv, VOCAB, self.chains),
            DraftPages(KvBlocks(BLOCKS, BLOCK_TOKENS), kv.groups, kv.page_tokens, kv.group_pages),
            eos_ids=target.eos_ids,
            keep_distributions=False,
            catch_up_tokens=64,
            cost=COST,
        )
        self._sequences = [_sequence(key, sampling) for key, sampling in enumerate(SAMPLINGS)]

    def run(self) -> list[Draft]:
        """Draft in three steps, after accepted and rejected drafts."""
        rng, found = random.Random(1), list[Draft]()
        for _ in range(3):
            chosen = rng.sample(self._sequences, rng.randint(2, 4))
            requests = [DraftRequest(sequence, rng.randint(1, 4)) for sequence in chosen]
            self.further_passes += max(request.max_tokens for request in requests) - 1
            drafts = self._proposer.propose(requests)
            for sequence, draft in zip(chosen, drafts, strict=True):
                accepted = rng.randint(0, len(draft))
                sequence.token_ids.extend((*draft.token_ids[:accepted], rng.randrange(COMMON)))
            found += drafts
        return found


def _sequence(key: int, sampling: dict[str, object]) -> Sequence:
    prompt = [token % COMMON for token in tokens_of(9 + 7 * key, key)]
    return Sequence.for_choice(
        key, request(str(key), prompt, Off(), **sampling), ResumedChoice(0, ())
    )
