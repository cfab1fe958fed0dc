"""Check whether the bits of a logit row depend on its batch, and measure the cost of `--exact`.

    python -m bench.engine.exactness --json bench/results/NAME.json

The benchmark computes tokens one by one, and again in verify blocks, prefill chunks and batches. It
reports the shares of logit rows that differ in any bit, and of greedy tokens that differ. It then
times steps, with all dtypes interleaved in each round, and compares them by the ratio within a
round. The models are the shipped model on held-out code, and a random model of 100M parameters. The
matrices of the random model do not fit the caches.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Sequence as Row
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, Final

import torch
from safetensors.torch import save_file
from torch import Tensor

from bench.harness.prompts import held_out_prompts
from bench.harness.provenance import provenance
from draftgate.backends.checkpoints import SHIPPED_MODEL
from draftgate.backends.core.drafts import Draft
from draftgate.backends.core.sequence import Sequence
from draftgate.backends.core.steps import SequenceWork, StepPlan
from draftgate.backends.engine.config import read_model_config
from draftgate.backends.engine.kv_pool import BLOCK_TOKENS, KvPool
from draftgate.backends.engine.model import Decoder
from draftgate.backends.engine.runner import Runner
from draftgate.backends.engine.weights import load_weights
from draftgate.backends.token_ids import compact
from draftgate.backends.tokenizer import Tokenizer
from draftgate.backends.types import GenerationRequest, ResumedChoice, SamplingParams
from draftgate.policies.speculation.baselines import Off
from draftgate.policies.types import RequestView, WorkerLoad

MODES: Final = {
    "float32": (torch.float32, False),
    "bfloat16": (torch.bfloat16, False),
    "bfloat16 --exact": (torch.bfloat16, True),
}

TOKENS: Final = 400
"""Number of tokens, enough to cross a border of KV tiles."""

WIDTHS: Final = {"verify 5": 5, "verify 9": 9, "prefill 40": 40, "prefill 256": 256}
BATCH: Final = 8

TIMED_CONTEXT: Final = 512
TIMED: Final = {
    "decode B1": (1, 1),
    "decode B8": (8, 1),
    "verify 5": (1, 5),
    "prefill 256": (1, 256),
}
"""The timed steps, as number of sequences and tokens per sequence."""

MOST_TOKENS: Final = max(TOKENS, TIMED_CONTEXT + max(width for _, width in TIMED.values()))
"""Maximum number of tokens of a sequence in the pool."""

RANDOM_VOCABULARY: Final = 32000
RANDOM_SHAPE: Final = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": RANDOM_VOCABULARY,
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "eos_token_id": 0,
}

RANDOM_GAIN: Final = 2.0
"""Standard deviation of the random matrices times the square root of their width."""


@dataclass(frozen=True)
class Feeder:
    """A model in a single mode, with a pool for a batch of sequences of `TOKENS` tokens."""

    runner: Runner

    @classmethod
    def of(cls, directory: Path, dtype: torch.dtype, *, exact: bool) -> Feeder:
        """Load a checkpoint."""
        config = read_model_config(directory)
        weights = load_weights(directory, config, dtype, exact=exact)
        pool = KvPool(config, BATCH * -(-(MOST_TOKENS) // BLOCK_TOKENS), dtype)
        return cls(Runner(Decoder(config, weights, MOST_TOKENS), pool))

    def in_steps(self, tokens: Row[int], width: int) -> Tensor:
        """Return the logits of all tokens, computed `width` at a time.

        Returns:
            Logits of shape (tokens, vocabulary).
        """
        edges = [*range(0, len(tokens), width), len(tokens)]
        steps = (StepPlan((_work(0, tokens, a, b),)) for a, b in pairwise(edges))
        return torch.cat([self.runner.logits(step) for step in steps])

    def in_batches(self, tokens: Row[int]) -> Tensor:
        """Return the logits of all tokens, computed singly next to sequences of other lengths."""
        found = []
        for place in range(len(tokens)):
            # Each neighbour advances more slowly than the previous one, and may repeat a token.
            places = [place // (index + 1) for index in range(BATCH)]
            step = StepPlan(tuple(_work(i, tokens, at, at + 1) for i, at in enumerate(places)))
            found.append(self.runner.logits(step)[:1])
        return torch.cat(found)

    def step_s(self, sequences: int, width: int) -> float:
        """Return the seconds of a forward pass after a context of `TIMED_CONTEXT` tokens."""
        tokens = [1] * (TIMED_CONTEXT + width)
        where = (TIMED_CONTEXT, len(tokens))
        plan = StepPlan(tuple(_work(index, tokens, *where) for index in range(sequences)))
        started_s = time.perf_counter()
        self.runner.logits(plan)
        return time.perf_counter() - started_s


def _work(index: int, tokens: Row[int], start: int, stop: int) -> SequenceWork:
    """Compute tokens[start:stop] of the sequence at `index`, and return all their logits."""
    sampling = SamplingParams(max_tokens=1, seed=0, temperature=0.0)
    plan = Off().decide(RequestView(1, 1, 0.0), WorkerLoad(0, 0, 0, 0, 0.0, 0.0, ()))
    sequence = Sequence.for_choice(
        index, GenerationRequest("feed", compact((0,)), sampling, plan), ResumedChoice(0, ())
    )
    blocks = -(-(MOST_TOKENS) // BLOCK_TOKENS)
    sequence.block_table.extend(range(index * blocks, (index + 1) * blocks))
    first, *drafts = tokens[start:stop]
    return SequenceWork(sequence, start, (first,), True, Draft(tuple(drafts)))


def random_checkpoint(directory: Path) -> Path:
    """Write a random bfloat16 model of `RANDOM_SHAPE`."""
    (directory / "config.json").write_text(json.dumps(RANDOM_SHAPE), encoding="utf-8")
    config = read_model_config(directory)
    hidden, inner = config.hidden_size, config.intermediate_size
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "embed_tokens": (config.vocab_size, hidden),
        "norm": (hidden,),
    }
    for layer in range(config.num_layers):
        prefix = f"layers.{layer}"
        shapes |= {
            f"{prefix}.self_attn.q_proj": (queries, hidden),
            f"{prefix}.self_attn.k_proj": (keys, hidden),
            f"{prefix}.self_attn.v_proj": (keys, hidden),
            f"{prefix}.self_attn.o_proj": (hidden, queries),
            f"{prefix}.mlp.gate_proj": (inner, hidden),
            f"{prefix}.mlp.up_proj": (inner, hidden),
            f"{prefix}.mlp.down_proj": (hidden, inner),
            f"{prefix}.input_layernorm": (hidden,),
            f"{prefix}.post_attention_layernorm": (hidden,),
        }
    random = torch.Generator().manual_seed(0)
    tensors = {
        f"model.{name}.weight": torch.ones(shape, dtype=torch.bfloat16)
        if len(shape) == 1
        else (torch.randn(shape, generator=random) * RANDOM_GAIN / shape[1] ** 0.5).bfloat16()
        for name, shape in shapes.items()
    }
    save_file(tensors, directory / "model.safetensors")
    return directory


def differing(feeder: Feeder, tokens: Row[int], alone: Tensor) -> dict[str, Any]:
    """Return the shares of logit rows and greedy tokens that differ from one-by-one steps."""
    shares = {}
    for name in (*WIDTHS, f"batch of {BATCH}"):
        width = WIDTHS.get(name)
        logits = feeder.in_batches(tokens) if width is None else feeder.in_steps(tokens, width)
        shares[name] = {
            "rows": _share((logits != alone).any(-1)),
            "greedy_tokens": _share(logits.argmax(-1) != alone.argmax(-1)),
        }
    return shares


def _share(which: Tensor) -> float:
    return round(float(which.float().mean()), 5)


def step_times(feeders: dict[str, Feeder], rounds: int) -> dict[str, Any]:
    """Return the median milliseconds of interleaved steps, and their ratios to plain bfloat16."""
    rows = {}
    for name, (sequences, width) in TIMED.items():
        taken: dict[str, list[float]] = {mode: [] for mode in feeders}
        for turn in range(rounds + 2):  # two warm-up rounds choose kernels and fill caches
            for mode in feeders if turn % 2 else reversed(feeders):
                taken[mode].append(feeders[mode].step_s(sequences, width))
        kept = {mode: seconds[2:] for mode, seconds in taken.items()}
        rows[name] = {
            "ms": {mode: round(median(seconds) * 1e3, 3) for mode, seconds in kept.items()},
            "ratio_to_bfloat16": {
                mode: round(
                    median(a / b for a, b in zip(seconds, kept["bfloat16"], strict=True)), 3
                )
                for mode, seconds in kept.items()
            },
        }
    return rows


def measure_model(directory: Path, tokens: Row[int], rounds: int) -> dict[str, Any]:
    """Return all results of a model."""
    feeders = {mode: Feeder.of(directory, dt, exact=exact) for mode, (dt, exact) in MODES.items()}
    alone = {mode: feeder.in_steps(tokens, 1) for mode, feeder in feeders.items()}
    greedy = {mode: logits.argmax(-1) for mode, logits in alone.items()}
    return {
        "tokens": len(tokens),
        "differing_from_one_by_one": {
            mode: differing(feeder, tokens, alone[mode]) for mode, feeder in feeders.items()
        },
        "greedy_tokens_unlike_float32": {
            mode: _share(greedy[mode] != greedy["float32"]) for mode in feeders
        },
        "timed_context_tokens": TIMED_CONTEXT,
        "steps": step_times(feeders, rounds),
    }


def measure(rounds: int) -> dict[str, Any]:
    """Return the results of both models with their provenance."""
    facts = provenance()
    prompts = held_out_prompts(Tokenizer(SHIPPED_MODEL), 32)
    code = [token for prompt in prompts for token in prompt][:TOKENS]
    models = {"shipped": measure_model(SHIPPED_MODEL, code, rounds)}
    random = torch.Generator().manual_seed(1)
    noise = torch.randint(0, RANDOM_VOCABULARY, (TOKENS,), generator=random).tolist()
    with tempfile.TemporaryDirectory() as folder:
        models["random 100M"] = measure_model(random_checkpoint(Path(folder)), noise, rounds)
    return {**facts, "models": models}


def main() -> None:
    """Measure the models, and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path, required=True)
    args = parser.parse_args()
    result = measure(args.rounds)
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
