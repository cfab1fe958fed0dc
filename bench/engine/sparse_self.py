"""Does a target that looks at little of its context draft well, and does it pay?

    python -m bench.engine.sparse_self --json bench/results/sparse-self.json

`acceptance`: the shipped model behind places in held-out code, by context and budget. Each place
counts with the first draft behind it, so texts that loop count no more than others.

`measured`: decode tokens per second of the shipped model, off against drafting, interleaved and end
to end. The texts must be the same. Greedy texts of a small model soon loop, which helps.

`modelled`: a random model with many keys and values for its weights, whose own acceptance means
nothing. Measured are seconds of a decode, of a verify step and of drafting; tokens per step are
those of `acceptance` at the same budget, and the speed-up is MagicDec's formula:
`tokens_per_step x decode_s / (drafting_s + verify_s)`.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from collections.abc import Sequence as Many
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final

import torch

from bench.engine.loading import random_checkpoint
from bench.engine.record import provenance
from bench.engine.speculation import Prompt, decode
from draftgate.backends.core.drafts import Draft
from draftgate.backends.core.kv_blocks import KvBlocks
from draftgate.backends.core.pipeline import run_until_idle
from draftgate.backends.core.proposer import DraftRequest, Proposer
from draftgate.backends.core.scheduler import Scheduler, SchedulerConfig
from draftgate.backends.core.sequence import Sequence
from draftgate.backends.core.steps import SequenceWork, StepPlan
from draftgate.backends.core.worker import WorkerCore
from draftgate.backends.engine.checkpoint import Checkpoint
from draftgate.backends.engine.config import ModelConfig, read_model_config
from draftgate.backends.engine.kv_pool import BLOCK_TOKENS, KvPool
from draftgate.backends.engine.load import LoadedEngine
from draftgate.backends.engine.model import Decoder
from draftgate.backends.engine.proposers.sparse_self import SparseSelfProposer
from draftgate.backends.engine.runner import Runner
from draftgate.backends.engine.served import ServedModel
from draftgate.backends.engine.warmup import measure_step_cost
from draftgate.backends.engine.weights import load_weights
from draftgate.backends.shipped import SHIPPED_MODEL, SHIPPED_MODEL_ID
from draftgate.backends.token_ids import compact
from draftgate.backends.tokenizer import Tokenizer
from draftgate.backends.types import GenerationRequest, ModelCard, ResumedChoice, SamplingParams
from draftgate.policies.speculation import Fixed
from draftgate.policies.step_cost import StepCost
from draftgate.policies.types import SpeculationMode, SpeculationPlan
from training.corpus import held_out_files

BUDGETS: Final = (128, 256, 512, 1024)
SINK_TOKENS: Final = 16
CONTEXTS: Final = (2048, 4096, 8000)
"""The longest leaves the shipped model room to write."""

DEPTH: Final = 4
TEMPERATURES: Final = (0.0, 0.8)
DOCUMENTS: Final = 8
PLACES: Final = 16
STRIDE: Final = 13
"""Places of a document and context, one every so many tokens before the context's end."""

BATCHES: Final = (1, 8)
AT_BATCH_1: Final = 4
"""Documents that are run one at a time."""

SPEED_BUDGET: Final = 512
SPEED_DEPTH: Final = 3
"""As most of MagicDec's runs have it."""

NEW_TOKENS: Final = 48

WIDE: Final = {
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "max_position_embeddings": 16384 + 2 * BLOCK_TOKENS,
    "tie_word_embeddings": True,
}
WIDE_CONTEXTS: Final = (2048, 4096, 8192, 16384)

MAGICDEC: Final = {
    "source": "arXiv 2408.11049, 8 A100, self-drafting with StreamingLLM's cache",
    "acceptance_llama_3_1_8b_budget_512": {"4k": 0.84, "16k": 0.82, "32k": 0.81, "100k": 0.79},
    "speedup_llama_3_1_8b_32k_by_batch": {"32": 1.22, "64": 1.38, "128": 1.47},
    "speedup_llama_2_7b_8k_by_batch": {"32": 1.18, "64": 1.48, "128": 1.63},
    "speedup_llama_2_7b_32k_by_batch": {"32": 2.0},
}


@dataclass(frozen=True)
class Model:
    """A checkpoint with a pool of its own."""

    config: ModelConfig
    decoder: Decoder
    pool: KvPool
    runner: Runner
    cost: StepCost
    weight_bytes: int

    @classmethod
    def load(cls, directory: Path, num_blocks: int) -> Model:
        """Load in float32 and time its steps."""
        config = read_model_config(directory)
        weights = load_weights(directory, config, torch.float32)
        decoder = Decoder(config, weights, config.max_position_embeddings)
        pool = KvPool(config, num_blocks, torch.float32)
        runner = Runner(decoder, pool)
        cost = measure_step_cost(runner, config.max_position_embeddings, num_blocks)
        weight_bytes = Checkpoint(directory).num_parameters * torch.float32.itemsize
        return cls(config, decoder, pool, runner, cost, weight_bytes)

    def proposer(self, budget_tokens: int) -> SparseSelfProposer:
        """Return a proposer of that budget."""
        return SparseSelfProposer(
            self.decoder,
            self.pool,
            budget_tokens=budget_tokens,
            sink_tokens=SINK_TOKENS,
            eos_ids=self.config.eos_ids,
            with_laws=False,
            cost=self.cost,
        )

    def bytes_of(self, context_tokens: int, batch: int) -> dict[str, int]:
        """Return what a decode step reads."""
        per_token = self.config.kv_bytes_per_token(torch.float32.itemsize)
        return {
            "weight_bytes": self.weight_bytes,
            "kv_bytes": per_token * context_tokens * batch,
        }


def engine_of(model: Model) -> LoadedEngine:
    """Return the shipped model with a proposer for each budget, that of `measured` first."""
    budgets = sorted(BUDGETS, key=lambda budget: budget != SPEED_BUDGET)
    proposers: dict[str, Proposer] = {str(budget): model.proposer(budget) for budget in budgets}
    scheduler = Scheduler(
        SchedulerConfig(max_num_seqs=32, max_step_tokens=512, eos_ids=model.config.eos_ids),
        KvBlocks(model.pool.num_blocks, BLOCK_TOKENS),
        Fixed(DEPTH),
        proposers,
        model.cost,
    )
    longest = model.config.max_position_embeddings
    worker = WorkerCore(scheduler, Tokenizer(SHIPPED_MODEL), longest)
    card = ModelCard(SHIPPED_MODEL_ID, SHIPPED_MODEL_ID, longest, None, 0)
    served = ServedModel(card, worker.admission)
    return LoadedEngine(worker, model.runner, served, proposers)


def documents(tokenizer: Tokenizer) -> list[tuple[int, ...]]:
    """Return held-out files one behind the other, in texts of the longest context."""
    files = list(held_out_files())
    random.Random(0).shuffle(files)
    ids: list[int] = []
    for path in files:
        ids += tokenizer.encode(path.read_text(encoding="utf-8"))
        if len(ids) >= DOCUMENTS * CONTEXTS[-1]:
            break
    texts = [ids[begin : begin + CONTEXTS[-1]] for begin in range(0, len(ids), CONTEXTS[-1])]
    return [tuple(text) for text in texts[:DOCUMENTS]]


# --- acceptance -------------------------------------------------------------------------------


def accepted_first(
    engine: LoadedEngine, prompts: Many[tuple[int, ...]], budget: int, temperature: float
) -> list[int]:
    """Return how many tokens of the first draft behind each prompt were accepted."""
    plan = SpeculationPlan("fixed", SpeculationMode.SPARSE_SELF, str(budget), DEPTH, "benchmark")
    for index, prompt in enumerate(prompts):
        # One token comes with the prompt, one behind the draft.
        sampling = SamplingParams(DEPTH + 2, index, temperature, ignore_eos=True)
        engine.worker.submit(GenerationRequest(str(index), compact(prompt), sampling, plan))
    accepted: dict[str, int] = {}
    for step in run_until_idle(engine.worker, engine.executor):
        for work, emitted in zip(step.plan.work, step.result.emitted, strict=True):
            if work.num_drafts:
                request_id = work.sequence.request.request_id
                assert work.num_drafts == DEPTH
                accepted[request_id] = len(emitted) - 1
                engine.worker.cancel(request_id)
    assert len(accepted) == len(prompts)
    return list(accepted.values())


def acceptance_rows(engine: LoadedEngine, texts: Many[tuple[int, ...]]) -> list[dict[str, Any]]:
    """Return acceptance by context, budget and temperature."""
    rows = []
    for context in CONTEXTS:
        ends = range(context, context - PLACES * STRIDE, -STRIDE)
        prompts = [text[:end] for text in texts for end in ends]
        for temperature in TEMPERATURES:
            for budget in BUDGETS:
                accepted = accepted_first(engine, prompts, budget, temperature)
                rows.append(
                    {
                        "context_tokens": context,
                        "budget_tokens": budget,
                        "temperature": temperature,
                        "drafts": len(accepted),
                        **_statistics(accepted),
                    }
                )
                print(rows[-1], flush=True)
    return rows


def _statistics(accepted: Many[int]) -> dict[str, Any]:
    """Return the acceptance of a token, its survival by depth, and tokens per step by length."""
    agreed, rejected = sum(accepted), sum(count < DEPTH for count in accepted)
    survival = [
        sum(count >= depth for count in accepted) / len(accepted) for depth in range(1, DEPTH + 1)
    ]
    return {
        "acceptance": round(agreed / (agreed + rejected), 3),
        "survival_by_depth": [round(share, 3) for share in survival],
        "tokens_per_step_by_length": [
            round(1 + sum(survival[:length]), 3) for length in range(1, DEPTH + 1)
        ],
    }


# --- measured ---------------------------------------------------------------------------------


def measured_rows(
    model: Model, engine: LoadedEngine, texts: Many[tuple[int, ...]], rounds: int
) -> list[dict[str, Any]]:
    """Return the speed-up over off, end to end, by context, batch and temperature."""
    rows = []
    for context in CONTEXTS:
        for batch in BATCHES:
            for temperature in TEMPERATURES:
                prompts = [
                    Prompt(text[:context], seed, NEW_TOKENS)
                    for seed, text in enumerate(texts[: max(batch, AT_BATCH_1)])
                ]
                groups = [prompts[i : i + batch] for i in range(0, len(prompts), batch)]
                head = {"context_tokens": context, "batch": batch, "temperature": temperature}
                head |= model.bytes_of(context, batch)
                rows.append(head | _compare(engine, groups, temperature, rounds))
                print(rows[-1], flush=True)
    return rows


def _compare(
    engine: LoadedEngine, groups: Many[Many[Prompt]], temperature: float, rounds: int
) -> dict[str, Any]:
    """Decode each batch with and without drafts, in turns."""
    policies = ("off", f"fixed:{SPEED_DEPTH}")
    rates: dict[str, list[float]] = {policy: [] for policy in policies}
    drafted = accepted = 0
    for turn in range(rounds):
        tokens, seconds = dict.fromkeys(policies, 0), dict.fromkeys(policies, 0.0)
        for number, group in enumerate(groups):
            texts = []
            for policy in policies if (turn + number) % 2 == 0 else policies[::-1]:
                sums, outputs = decode(engine, group, policy, temperature)
                tokens[policy] += sums.tokens
                seconds[policy] += sums.seconds
                drafted, accepted = drafted + sums.drafted, accepted + sums.accepted
                texts.append(outputs)
            assert texts[0] == texts[1], "drafts must not change the text"
        for policy in policies:
            rates[policy].append(tokens[policy] / seconds[policy])
    ratios = [new / old for old, new in zip(*rates.values(), strict=True)]
    return {
        "off_tokens_per_s": round(median(rates["off"]), 1),
        "sparse_tokens_per_s": round(median(rates[policies[1]]), 1),
        "accepted_share": round(accepted / drafted, 3),
        "speedup": round(median(ratios), 3),
        "speedup_of_rounds": [round(ratio, 3) for ratio in ratios],
    }


# --- modelled ---------------------------------------------------------------------------------


def modelled_rows(acceptance: Many[dict[str, Any]], rounds: int) -> list[dict[str, Any]]:
    """Return step times of the random model and what they make of the acceptance found."""
    per_sequence = WIDE["max_position_embeddings"] // BLOCK_TOKENS
    with tempfile.TemporaryDirectory() as directory:
        path = random_checkpoint(Path(directory), **WIDE)
        model = Model.load(path, per_sequence * BATCHES[-1])
    for layer in model.pool.layers:
        layer.uniform_(-1.0, 1.0)  # else it is one page of zeros, which fits any cache
    rows = []
    for context in WIDE_CONTEXTS:
        for batch in BATCHES:
            seconds = [_seconds(model, context, batch, per_sequence) for _ in range(rounds + 1)][1:]
            decode_s, drafting_s, verify_s = (median(times) for times in zip(*seconds, strict=True))
            rows.append(
                {
                    "context_tokens": context,
                    "batch": batch,
                    **model.bytes_of(context, batch),
                    "decode_ms": round(1e3 * decode_s, 3),
                    "drafting_ms": round(1e3 * drafting_s, 3),
                    "verify_ms": round(1e3 * verify_s, 3),
                    "modelled_speedups": _speedups(acceptance, context, seconds),
                }
            )
            print(rows[-1], flush=True)
    return rows


def _seconds(
    model: Model, context: int, batch: int, blocks_each: int
) -> tuple[float, float, float]:
    """Return seconds of a decode step, of drafting, and of the verify step."""
    requests = [
        DraftRequest(_sequence(index, context, blocks_each), SPEED_DEPTH) for index in range(batch)
    ]
    last, nothing = context - 1, Draft()
    started_s = time.perf_counter()
    drafts = model.proposer(SPEED_BUDGET).propose(requests)
    drafting_s = time.perf_counter() - started_s
    steps_s = [
        model.runner.execute(
            StepPlan(
                tuple(
                    SequenceWork(request.sequence, last, (1,), samples=True, draft=draft)
                    for request, draft in zip(requests, fed, strict=True)
                )
            )
        ).step_s
        for fed in ([nothing] * batch, drafts)
    ]
    return steps_s[0], drafting_s, steps_s[1]


def _sequence(index: int, context: int, blocks_each: int) -> Sequence:
    """Return a sequence of arbitrary tokens all but the last of which count as computed."""
    sampling = SamplingParams(max_tokens=DEPTH + 2, seed=0, temperature=0.0)
    plan = SpeculationPlan("fixed", SpeculationMode.SPARSE_SELF, None, DEPTH, "benchmark")
    request = GenerationRequest(str(index), compact((1,) * context), sampling, plan)
    sequence = Sequence.of(index, request, ResumedChoice(0, ()))
    sequence.num_computed = context - 1
    sequence.block_table.extend(range(index * blocks_each, (index + 1) * blocks_each))
    return sequence


def _speedups(
    acceptance: Many[dict[str, Any]], context: int, seconds: Many[tuple[float, float, float]]
) -> list[dict[str, Any]]:
    """Return the speed-up at the acceptance of each temperature, at the nearest context below."""
    known = max(found for found in CONTEXTS if found <= context)
    found = []
    for row in acceptance:
        if row["context_tokens"] == known and row["budget_tokens"] == SPEED_BUDGET:
            tokens = row["tokens_per_step_by_length"][SPEED_DEPTH - 1]
            ratios = [decode_s / (draft_s + verify_s) for decode_s, draft_s, verify_s in seconds]
            found.append(
                {
                    "temperature": row["temperature"],
                    "acceptance_of_context": known,
                    "tokens_per_step": tokens,
                    "speedup": round(tokens * median(ratios), 3),
                }
            )
    return found


def measure(rounds: int) -> dict[str, Any]:
    """Return the whole measurement."""
    torch.set_num_threads(1)
    facts = provenance()
    # Room for all documents, and for a batch that goes on behind them.
    model = Model.load(SHIPPED_MODEL, (DOCUMENTS + 1) * CONTEXTS[-1] // BLOCK_TOKENS)
    engine = engine_of(model)
    texts = documents(engine.worker.tokenizer)
    # The first runs compute the prompts; all others find them in the cache.
    decode(engine, [Prompt(text, 0, 1) for text in texts], "off", 0.0)
    acceptance = acceptance_rows(engine, texts)
    return {
        **facts,
        "sink_tokens": SINK_TOKENS,
        "speed_budget_tokens": SPEED_BUDGET,
        "speed_draft_tokens": SPEED_DEPTH,
        "rounds": rounds,
        "acceptance": acceptance,
        "measured": measured_rows(model, engine, texts, rounds),
        "modelled_shape": WIDE,
        "modelled": modelled_rows(acceptance, rounds),
        "magicdec": MAGICDEC,
    }


def main() -> None:
    """Measure and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, required=True)
    args = parser.parse_args()
    result = measure(args.rounds)
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
