"""Proposers by name, including the proposers of other packages (entry points)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from draftgate.backends.core.draft_growth import READ_PER_PASS
from draftgate.backends.core.draft_pages import DraftPages
from draftgate.backends.core.drafts import PREDICTION
from draftgate.backends.core.kv_blocks import KvBlocks
from draftgate.backends.core.proposer import Proposer
from draftgate.backends.engine.eagle.head import EagleHead
from draftgate.backends.engine.gpu.head_passes import HeadPasses
from draftgate.backends.engine.gpu.shapes import Shapes, row_bucket
from draftgate.backends.engine.inputs import Feed
from draftgate.backends.engine.kv_pool import DraftLayers, KvPool
from draftgate.backends.engine.model import Decoder
from draftgate.backends.engine.proposers.chains import Forward
from draftgate.backends.engine.proposers.draft_model import DraftModel, DraftModelProposer
from draftgate.backends.engine.proposers.eagle import EagleProposer, HeadRunner
from draftgate.backends.engine.proposers.ngram import NgramProposer
from draftgate.backends.engine.proposers.prediction import PredictionProposer
from draftgate.backends.engine.proposers.sparse_self import SparseSelfProposer
from draftgate.backends.engine.warmup import TOKEN_STRIDE, measure_depths
from draftgate.backends.worker_config import WorkerConfig
from draftgate.extensions import extensions
from draftgate.policies.costs.step_cost import StepCost

if TYPE_CHECKING:
    from draftgate.backends.engine.gpu.chains import DeviceChains

PROPOSER_GROUP: Final = "draftgate.proposers"


@dataclass(frozen=True, slots=True)
class ProposerSetup:
    """The parts of a worker that a proposer may use.

    Attributes:
        config: the worker's settings.
        decoder, pool, blocks: the target, its KV memory, and the allocator of that memory.
        forward: runs the target over its KV memory.
        cost: the cost of the target's steps.
        draft: the draft model, or None.
        head: the EAGLE-3 head, whose features the pool holds, or None.
        max_model_len: maximum tokens of a sequence, or None for the model's own bound.
        depth_cost: the cost of drafting that an earlier start has measured, or None to measure it.
    """

    config: WorkerConfig
    decoder: Decoder
    pool: KvPool
    blocks: KvBlocks
    forward: Forward
    cost: StepCost
    draft: Decoder | None = None
    head: EagleHead | None = None
    max_model_len: int | None = None
    depth_cost: StepCost | None = None

    @property
    def eos_ids(self) -> frozenset[int]:
        """Tokens of the vocabulary that end a sequence."""
        return self.decoder.config.known_eos_ids

    @property
    def keep_distributions(self) -> bool:
        """Whether sampled drafts carry their distributions."""
        return self.config.verify == "rejection"

    @property
    def longest(self) -> int:
        """Maximum tokens of a sequence."""
        return self.max_model_len or self.decoder.config.max_position_embeddings


ProposerFactory = Callable[[ProposerSetup], Proposer]


def _ngram(setup: ProposerSetup) -> Proposer:
    config = setup.config
    # Drafts from a corpus depend on earlier requests, so no recording could replay them.
    records = config.record_acceptance is not None
    return NgramProposer(corpus_bytes=0 if records else config.ngram_corpus_bytes)


def _sparse_self(setup: ProposerSetup) -> Proposer:
    return SparseSelfProposer(
        setup.forward,
        budget_tokens=setup.config.sparse_budget_tokens,
        sink_tokens=setup.config.sparse_sink_tokens,
        eos_ids=setup.eos_ids,
        keep_distributions=setup.keep_distributions,
        cost=setup.cost,
    )


def _draft_model(setup: ProposerSetup) -> Proposer:
    assert setup.draft is not None
    kv = setup.pool.draft_layers(setup.draft.config)
    chains = None if setup.draft.device.type == "cpu" else _captured(setup, setup.draft, kv)
    model = DraftModel(setup.draft, kv, setup.decoder.config.vocab_size, chains)
    vocab_size = setup.draft.config.vocab_size
    limits = setup.config.step_limits(setup.decoder.device.type)
    feeds = [
        Feed((index * TOKEN_STRIDE % vocab_size,), 0, [0], num_samples=1)
        for index in range(limits.sequences)
    ]
    return DraftModelProposer(
        model,
        DraftPages(setup.blocks, kv.groups, kv.page_tokens, kv.group_pages),
        eos_ids=setup.eos_ids,
        keep_distributions=setup.keep_distributions,
        catch_up_tokens=limits.tokens,
        cost=setup.depth_cost
        or measure_depths(
            lambda count: model.forward(feeds[:count]),
            lambda: setup.forward(feeds[:1]),
            limits.sequences,
        ),
    )


def _eagle(setup: ProposerSetup) -> Proposer:
    assert setup.head is not None
    kv = setup.pool.draft_layers(setup.head.config.model)
    passes = None if setup.head.device.type == "cpu" else _captured_head(setup, setup.head, kv)
    runner = HeadRunner(setup.head, setup.pool, kv, passes)
    token = Feed((0,), 0, [0], num_samples=1)
    limits = setup.config.step_limits(setup.decoder.device.type)
    return EagleProposer(
        runner,
        DraftPages(setup.blocks, kv.groups, kv.page_tokens, kv.group_pages),
        eos_ids=setup.eos_ids,
        keep_distributions=setup.keep_distributions,
        catch_up_tokens=limits.tokens,
        cost=setup.depth_cost
        or measure_depths(
            lambda count: runner.read([token] * count, [0] * count).logits,
            lambda: setup.forward([token]),
            limits.sequences,
        ),
    )


def _captured(setup: ProposerSetup, draft: Decoder, kv: DraftLayers) -> DeviceChains:
    """Capture the passes of a draft model on a GPU."""
    # Some machines lack Triton.
    from draftgate.backends.engine.gpu.chains import DeviceChains

    chains = DeviceChains(
        draft,
        kv,
        setup.decoder.config.vocab_size,
        max_num_seqs=setup.config.step_limits(draft.device.type).sequences,
        max_model_len=setup.longest,
    )
    chains.capture()
    return chains


def _captured_head(setup: ProposerSetup, head: EagleHead, kv: DraftLayers) -> HeadPasses:
    """Capture the passes of a head on a GPU."""
    most = setup.config.step_limits(head.device.type).sequences
    shapes = Shapes(row_bucket(READ_PER_PASS * most), most, setup.longest, kv.page_tokens)
    passes = HeadPasses(head, kv, shapes)
    passes.capture()
    return passes


_BUILT_IN: Final[dict[str, ProposerFactory]] = {
    "ngram": _ngram,
    "eagle": _eagle,
    "draft_model": _draft_model,
    "sparse_self": _sparse_self,
}
"""Built-in proposers, cheapest first: n-gram lookup, one layer, a smaller model, the model itself.
"""

_NEEDS: Final = {"draft_model": "a draft model", "eagle": "an EAGLE-3 head"}
"""What a proposer needs from `--draft-model`."""


def proposer_names(draft: str | None) -> tuple[str, ...]:
    """Return the names of all available proposers, cheapest first.

    Args:
        draft: the proposer that runs the worker's draft model, or None without a draft model.
    """
    found = sorted(extensions(PROPOSER_GROUP))
    built_in = [name for name in _BUILT_IN if name not in _NEEDS or name == draft]
    return (*built_in, *(name for name in found if name not in _BUILT_IN))


def check_proposer_name(name: str | None, draft: str | None) -> None:
    """Check that a worker can offer a proposer. None means all available proposers.

    Args:
        draft: the proposer that runs the worker's draft model, or None without a draft model.

    Raises:
        ValueError: the name is unknown, or the proposer lacks its draft model.
    """
    if name is None or name in proposer_names(draft):
        return
    if name in _NEEDS:
        raise ValueError(f"the proposer {name} needs {_NEEDS[name]}: --draft-model")
    known = dict.fromkeys((*_BUILT_IN, *proposer_names(None)))
    raise ValueError(f"unknown proposer {name!r}; known: {', '.join(known)}")


def make_proposers(setup: ProposerSetup) -> dict[str, Proposer]:
    """Return the configured proposer of a worker or all available ones, and that of predictions.

    Other packages register proposers as entry points in `draftgate.proposers`: callables that take
    a `ProposerSetup` and return a `Proposer`.

    Raises:
        ValueError: the name is unknown, the proposer lacks a draft model, or a setting is invalid.
    """
    wanted = setup.config.proposer
    draft = (
        "eagle" if setup.head is not None else "draft_model" if setup.draft is not None else None
    )
    check_proposer_name(wanted, draft)
    names = proposer_names(draft) if wanted is None else (wanted,)
    proposers = {name: _factory(name)(setup) for name in names}
    if setup.config.record_acceptance is None:  # a recording has no predictions to replay
        proposers[PREDICTION] = PredictionProposer()
    return proposers


def measured_depths(proposers: Mapping[str, Proposer]) -> StepCost | None:
    """Return the cost of drafting with the draft model or head, or None without either."""
    found = (p for p in proposers.values() if isinstance(p, DraftModelProposer | EagleProposer))
    return next((proposer.cost for proposer in found), None)


def _factory(name: str) -> ProposerFactory:
    if name in _BUILT_IN:
        return _BUILT_IN[name]
    factory: ProposerFactory = extensions(PROPOSER_GROUP)[name].load()
    return factory
