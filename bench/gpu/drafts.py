"""The stage that times chains of a draft model: by the host, with separate launches, in graphs."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from statistics import median
from typing import Any, Final

from bench.engine.bench_engine import step_plan
from bench.engine.cases import Case
from bench.engine.device import elapsed_s
from bench.engine.models import Model
from bench.gpu.setting import Setting
from draftgate.backends.core.draft_pages import DraftPages
from draftgate.backends.core.kv_blocks import KvBlocks
from draftgate.backends.core.proposer import DraftRequest, Proposer
from draftgate.backends.engine.kv_pool import BLOCK_TOKENS, KvPool
from draftgate.backends.engine.model import Decoder
from draftgate.backends.engine.proposers.draft_model import DraftModel, DraftModelProposer
from draftgate.backends.token_ids import compact
from draftgate.backends.types import SamplingParams
from draftgate.policies.costs.step_cost import StepCost

SEQUENCES: Final = (1, 8, 64)
DRAFTS: Final = (1, 2, 3, 4, 8)
CONTEXT_TOKENS: Final = 1024
ROUNDS: Final = 9
SAMPLING: Final = SamplingParams(max_tokens=1, seed=1, temperature=0.8)


def run_drafts(setting: Setting) -> dict[str, Any]:
    """Return the times of chains of a 1B model over sequences and drafts.

    The proposers alternate. A rehearsal without a GPU has only chains that the host extends.
    """
    batches, lengths = ((1, 2), (2,)) if setting.tiny else (SEQUENCES, DRAFTS)
    context, rounds = (64, 1) if setting.tiny else (CONTEXT_TOKENS, ROUNDS)
    rows: list[dict[str, Any]] = []
    with setting.model("random-1b") as model:
        proposers = dict(_proposers(model, max(batches), context + max(lengths)))
        for sequences in batches:
            for drafts in lengths:
                requests = _requests(model, sequences, drafts, context)
                found = _times_ms(model, proposers, requests, rounds)
                rows.append({"sequences": sequences, "drafts": drafts, **found})
                print(rows[-1], flush=True)
    return {"drafts": rows}


def _proposers(model: Model, sequences: int, longest: int) -> Iterator[tuple[str, Proposer]]:
    """Yield proposers that share the model, its memory and the pages of all sequences."""
    num_blocks = sequences * (-(-longest // BLOCK_TOKENS) + 1)
    pool = KvPool(model.config, num_blocks, model.dtype, model.device)
    pool.memory.uniform_(-1.0, 1.0)
    decoder = Decoder(model.config, model.weights(exact=False), longest)
    kv = pool.draft_layers(model.config)
    blocks = KvBlocks(num_blocks, BLOCK_TOKENS)
    pages = DraftPages(blocks, kv.groups, kv.page_tokens, kv.group_pages)
    vocab_size = model.config.vocab_size
    models = {"host": DraftModel(decoder, kv, vocab_size)}
    if model.device.type == "cuda":
        from draftgate.backends.engine.gpu.chains import DeviceChains

        for name in ("launches", "graphs"):
            chains = DeviceChains(
                decoder, kv, vocab_size, max_num_seqs=sequences, max_model_len=longest
            )
            if name == "graphs":
                chains.capture()
            models[name] = DraftModel(decoder, kv, vocab_size, chains)
    for name, draft_model in models.items():
        yield (
            name,
            DraftModelProposer(
                draft_model,
                pages,
                eos_ids=frozenset(),
                keep_distributions=False,
                catch_up_tokens=sequences,
                cost=StepCost((1,), (1e-3,)),
            ),
        )


def _requests(model: Model, sequences: int, drafts: int, context: int) -> list[DraftRequest]:
    """Return requests for sequences of which the draft model has read all tokens but the last."""
    plan = step_plan([Case("decode", sequences, 1, context)], model.config.vocab_size, SAMPLING)
    found = [work.sequence for work in plan.work]
    for sequence in found:
        sequence.token_ids[:] = compact([t % model.config.vocab_size for t in range(context)])
        sequence.draft_table.valid_tokens = context - 1
    return [DraftRequest(sequence, drafts) for sequence in found]


def _times_ms(
    model: Model, proposers: dict[str, Proposer], requests: list[DraftRequest], rounds: int
) -> dict[str, float]:
    """Return the median milliseconds of each proposer's drafts, after a round of warm-up."""
    taken_s: dict[str, list[float]] = {name: [] for name in proposers}
    for _ in range(1 + rounds):
        for name, proposer in proposers.items():
            draw = partial(proposer.propose, requests)
            taken_s[name].append(elapsed_s(model.device, draw))
    for request in requests:
        for proposer in proposers.values():
            proposer.forget(request.sequence)
    return {f"{name}_ms": round(1e3 * median(s[1:]), 3) for name, s in taken_s.items()}
