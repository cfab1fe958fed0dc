"""What n-gram drafts cost and bring: the index, and chains against trees.

    python -m bench.engine.ngram --json bench/results/ngram-index.json

The texts are held-out files of the shipped model's corpus. Drafts are replayed along the real text:
each step proposes, takes what agrees and one token more, as a verify step would.
"""

from __future__ import annotations

import argparse
import json
import random
import time
import tracemalloc
from collections.abc import Sequence as Many
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from bench.engine.record import provenance
from draftgate.backends.core.proposer import DraftRequest
from draftgate.backends.core.sequence import Sequence
from draftgate.backends.engine.proposers import ngram_index
from draftgate.backends.engine.proposers.ngram import NgramProposer
from draftgate.backends.shipped import SHIPPED_MODEL
from draftgate.backends.token_ids import compact
from draftgate.backends.tokenizer import Tokenizer
from draftgate.backends.types import GenerationRequest, ResumedChoice, SamplingParams
from draftgate.policies.types import SpeculationMode, SpeculationPlan
from training.corpus import held_out_files

CONTEXTS = (1_000, 10_000, 100_000)
LOOK_UPS = 2_000
SLOTS = (2, 4, 8, 16)
MATCHES = (1, 4, 8, 16)
REPLAYED_FILES = 25
PROMPT_TOKENS, TEXT_TOKENS = 300, 2_500
SEED = 3


def texts(tokenizer: Tokenizer) -> list[list[int]]:
    """Return the tokens of all held-out files, shuffled."""
    read = [tokenizer.encode(p.read_text(errors="ignore")) for p in held_out_files()]
    random.Random(SEED).shuffle(read)
    return read


def sequence_of(tokens: Many[int]) -> Sequence:
    """Return a sequence with these tokens."""
    plan = SpeculationPlan("bench", SpeculationMode.NGRAM, "ngram", 16, "a benchmark")
    request = GenerationRequest("bench", compact(tokens), SamplingParams(1, 0), plan)
    return Sequence.of(0, request, ResumedChoice(0, ()))


def index_costs(text: Many[int], context: int) -> dict[str, Any]:
    """Return microseconds and bytes of indexing `context` tokens and of proposing behind them."""
    tracemalloc.start()
    index = ngram_index.NgramIndex()
    index.catch_up(text[:context])
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    started_s = time.perf_counter()
    ngram_index.NgramIndex().catch_up(text[:context])
    append_s = (time.perf_counter() - started_s) / context

    proposer, sequence = NgramProposer(), sequence_of(text[:context])
    asked = [DraftRequest(sequence, 8)]
    proposer.propose(asked)
    taken_s = []
    for token in text[context : context + LOOK_UPS]:
        sequence.token_ids.append(token)
        started_s = time.perf_counter()
        proposer.propose(asked)
        taken_s.append(time.perf_counter() - started_s)
    return {
        "context_tokens": context,
        "append_us": round(append_s * 1e6, 3),
        "propose_us": {
            "median": round(median(taken_s) * 1e6, 1),
            "p99": round(quantiles(taken_s, n=100)[98] * 1e6, 1),
        },
        "index_bytes_per_token": round(held / context, 1),
    }


def replay(files: Many[Many[int]], slots: int, *, trees: bool) -> dict[str, float]:
    """Return tokens and wasted slots a step along real texts."""
    steps = tokens = wasted = 0
    for text in files:
        proposer, sequence = NgramProposer(trees=trees), sequence_of(text[:PROMPT_TOKENS])
        while (at := len(sequence.token_ids)) < len(text) - 1:
            (draft,) = proposer.propose([DraftRequest(sequence, slots)])
            agreed = len(draft.accepted_places(text[at : at + slots + 1]))
            sequence.token_ids.extend(text[at : at + agreed + 1])
            steps, tokens, wasted = steps + 1, tokens + agreed + 1, wasted + len(draft) - agreed
    return {
        "tokens_per_step": round(tokens / steps, 3),
        "wasted_per_step": round(wasted / steps, 3),
    }


def measure() -> dict[str, Any]:
    """Return the whole measurement."""
    facts = provenance()
    every = texts(Tokenizer(SHIPPED_MODEL))
    whole = [token for text in every for token in text]
    files = [text[:TEXT_TOKENS] for text in every if len(text) >= TEXT_TOKENS][:REPLAYED_FILES]
    costs = [index_costs(whole, context) for context in CONTEXTS]
    replays = []
    for slots in SLOTS:
        row = {"slots": slots, "chain": replay(files, slots, trees=False)}
        replays.append({**row, "tree": replay(files, slots, trees=True)})
        print(replays[-1])
    kept, compared = ngram_index.MOST_MATCHES, []
    for most in MATCHES:
        ngram_index.MOST_MATCHES = most  # type: ignore[misc]
        compared.append({"matches": most, **replay(files, 8, trees=True)})
    ngram_index.MOST_MATCHES = kept  # type: ignore[misc]
    return {
        **facts,
        "index": costs,
        "replay": {"files": len(files), "tokens_each": TEXT_TOKENS, "by_slots": replays},
        "replay_8_slots_by_matches_compared": compared,
    }


def main() -> None:
    """Measure and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True)
    path = parser.parse_args().json
    path.write_text(json.dumps(measure(), indent=1) + "\n", encoding="utf-8")
    print(path.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
