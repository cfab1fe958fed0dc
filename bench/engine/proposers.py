"""Measure accepted tokens and wasted slots of each proposer on held-out code.

    python -m bench.engine.proposers --json bench/results/proposers.json

The tasks are to complete code, to rewrite code of the prompt as an editor does, and to continue a
long context. The benchmark also records every draft and its outcome. These records are split by
prompt into two files, `NAME-train.jsonl.gz` and `NAME-held-out.jsonl.gz`. Estimates of survival are
fitted to the first file and tested on the second file. All results are counts, so they do not
depend on the machine.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

from bench.harness.prompts import held_out_prompts
from bench.harness.provenance import provenance
from draftgate.backends.core.pipeline import run_until_idle
from draftgate.backends.core.steps import SequenceWork
from draftgate.backends.engine.load import load_engine
from draftgate.backends.engine.loaded import LoadedEngine
from draftgate.backends.engine.proposers.ngram import NgramProposer
from draftgate.backends.token_ids import compact
from draftgate.backends.tokenizer import Tokenizer
from draftgate.backends.types import GenerationRequest, SamplingParams
from draftgate.backends.worker_config import WorkerConfig
from draftgate.policies.types import SpeculationMode, SpeculationPlan
from training.corpus import held_out_files

SLOTS: Final = (4, 8)
TEMPERATURES: Final = (0.0, 0.8)
NEW_TOKENS: Final = 96
PROMPTS: Final = 32
SHOWN_TOKENS, BEGUN_TOKENS = 240, 40
LONG_PROMPTS: Final = 8
LONG_TOKENS: Final = 4_000
KV_BYTES: Final = 256 << 20
REWRITE: Final = "\n\n# The same, with names that say more:\n"

PROPOSERS: Final = ("ngram", "ngram_chain", "draft_model", "sparse_self")
"""`ngram_chain` is `ngram` without branches."""


class Outcome(NamedTuple):
    """The outcome of a draft.

    Attributes:
        prompt: index of the prompt in its task.
        evidence: evidence of the proposer, on the proposer's own scale.
        proposed: number of verified tokens.
        agreed: number of accepted tokens.
        rejected: whether the next token differed from the proposed token.
    """

    prompt: int
    evidence: int
    proposed: int
    agreed: int
    rejected: bool


@dataclass
class Tally:
    """Sums over the decode steps of a run."""

    steps: int = 0
    tokens: int = 0
    outcomes: list[Outcome] = field(default_factory=list)

    def add(self, work: SequenceWork, emitted: tuple[int, ...]) -> None:
        """Add the result of a step for a sequence."""
        self.steps += 1
        self.tokens += len(emitted)
        if work.draft:
            path, prompt = (
                work.draft.accepted_places(emitted),
                int(work.sequence.request.request_id),
            )
            rejected = work.draft.was_rejected(path, emitted)
            self.outcomes.append(
                Outcome(prompt, work.draft.evidence, len(work.draft), len(path), rejected)
            )

    def summary(self) -> dict[str, Any]:
        """Return the metrics of the run."""
        proposed = sum(outcome.proposed for outcome in self.outcomes)
        agreed = sum(outcome.agreed for outcome in self.outcomes)
        return {
            "tokens_per_step": round(self.tokens / self.steps, 3),
            "wasted_slots_per_step": round((proposed - agreed) / self.steps, 3),
            "drafts_per_step": round(len(self.outcomes) / self.steps, 3),
            "accepted_share": round(agreed / proposed, 3) if proposed else None,
        }


def tasks(tokenizer: Tokenizer) -> dict[str, list[tuple[int, ...]]]:
    """Return the prompts by task, identical in each call."""
    shown = held_out_prompts(tokenizer, PROMPTS, seed=1, least=SHOWN_TOKENS, most=SHOWN_TOKENS)
    ask = tokenizer.encode(REWRITE)
    return {
        "completion": held_out_prompts(tokenizer, PROMPTS, least=100, most=240),
        "rewrite": [(*code, *ask, *code[:BEGUN_TOKENS]) for code in shown],
        "long_context": list(_long_prompts(tokenizer)),
    }


def _long_prompts(tokenizer: Tokenizer) -> Iterator[tuple[int, ...]]:
    files = list(held_out_files())
    random.Random(2).shuffle(files)
    for _ in range(LONG_PROMPTS):
        tokens: list[int] = []
        while len(tokens) < LONG_TOKENS:
            tokens += tokenizer.encode(files.pop().read_text(encoding="utf-8", errors="ignore"))
        yield tuple(tokens[:LONG_TOKENS])


def run(
    engine: LoadedEngine,
    prompts: list[tuple[int, ...]],
    proposer: str,
    slots: int,
    temperature: float,
) -> Tally:
    """Generate a text for every prompt, with drafts of at most `slots` tokens."""
    plan = SpeculationPlan("bench", SpeculationMode.AUTO, proposer, slots, "a benchmark")
    for index, prompt in enumerate(prompts):
        sampling = SamplingParams(NEW_TOKENS, index, temperature, ignore_eos=True)
        engine.worker.submit(GenerationRequest(str(index), compact(prompt), sampling, plan))
    tally = Tally()
    for step in run_until_idle(engine.worker, engine.executor):
        for work, emitted in zip(step.plan.work, step.result.emitted, strict=True):
            if work.start >= work.sequence.prompt_tokens:
                tally.add(work, emitted)
    return tally


def measure(outcomes: dict[str, list[list[Any]]]) -> dict[str, Any]:
    """Return all results, and append every draft to `outcomes`, by split."""
    facts, results = provenance(), []
    for proposer in PROPOSERS:
        name = proposer.removesuffix("_chain")
        config = WorkerConfig(
            proposer=name, speculation=f"fixed:{max(SLOTS)}", kv_bytes=KV_BYTES, max_num_seqs=8
        )
        engine = load_engine(config)
        if name != proposer:
            engine.proposers[name] = NgramProposer(trees=False)
        for task, prompts in tasks(engine.worker.tokenizer).items():
            for temperature in TEMPERATURES:
                for slots in SLOTS:
                    tally = run(engine, prompts, name, slots, temperature)
                    head = {"task": task, "temperature": temperature, "slots": slots}
                    results.append({"proposer": proposer, **head, **tally.summary()})
                    print(results[-1])
                    if slots == max(SLOTS):
                        _record(outcomes, (proposer, task, temperature), tally)
    return {**facts, "prompts": PROMPTS, "long_prompts": LONG_PROMPTS, "results": results}


def _record(
    outcomes: dict[str, list[list[Any]]], setting: tuple[str, str, float], tally: Tally
) -> None:
    for outcome in tally.outcomes:
        split = "held-out" if outcome.prompt % 2 else "train"
        row = [*setting, *outcome[:-1], int(outcome.rejected)]
        outcomes.setdefault(split, []).append(row)


def _write_outcomes(path: Path, rows: list[list[Any]]) -> None:
    columns = ["proposer", "task", "temperature", *Outcome._fields]
    lines = [json.dumps({"format": "drafts/1", "columns": columns}), *map(json.dumps, rows)]
    path.write_bytes(gzip.compress("\n".join([*lines, ""]).encode(), mtime=0))


def main() -> None:
    """Measure the proposers, and write the JSON and the drafts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True)
    path = parser.parse_args().json
    outcomes: dict[str, list[list[Any]]] = {}
    path.write_text(json.dumps(measure(outcomes), indent=1) + "\n", encoding="utf-8")
    for split, rows in outcomes.items():
        _write_outcomes(path.with_name(f"{path.stem}-{split}.jsonl.gz"), rows)


if __name__ == "__main__":
    main()
