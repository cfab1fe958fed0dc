"""Record the accepted draft length at every position, for the simulator to replay.

    python -m bench.engine.acceptance --json backends/sim/recordings/draftgate-demo.json

The recordings of `bench.engine.proposers` hold one draft per step of a run with drafts of 8 tokens,
so they fit only that run. In this module the model generates without drafts, and each proposer
drafts at every position. The text then shows how many tokens of each draft were right.

Verification samples from the target's distribution, so the text does not depend on the draft
lengths. The simulator therefore finds a record for every draft length that a policy chooses. The
prompts are the held-out prompts of `bench.engine.proposers`.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence as Many
from itertools import takewhile
from pathlib import Path
from typing import Final

from bench.engine.proposers import KV_BYTES, TEMPERATURES, tasks
from bench.engine.speculation import loop_start
from bench.harness.provenance import provenance
from draftgate.backends.core.drafts import NO_DRAFT, Draft
from draftgate.backends.core.pipeline import run_until_idle
from draftgate.backends.core.proposer import DraftRequest, Proposer
from draftgate.backends.core.sequence import Sequence
from draftgate.backends.engine.load import LoadedEngine, load_engine
from draftgate.backends.engine.proposers.ngram import NgramProposer
from draftgate.backends.sim.recording import Columns, Guess, RecordingFile, Text
from draftgate.backends.token_ids import TokenIds, compact
from draftgate.backends.types import GenerationRequest, SamplingParams
from draftgate.backends.worker_config import WorkerConfig
from draftgate.policies.types import SpeculationMode, SpeculationPlan

SLOTS: Final = 16
"""Requested draft length, the longest that `auto` plans."""

POSITIONS: Final = 160
"""Recorded positions per text. Texts are longer, so that the last drafts can be checked."""

LEAST_POSITIONS: Final = 24
"""Minimum number of tokens before a loop. N-grams predict a loop perfectly, so texts that loop
earlier are left out."""

PROPOSERS: Final = ("ngram", "draft_model", "sparse_self")
"""`ngram` without branches, because the simulator's drafts are chains."""

SPARSE_TASKS: Final = ("long_context",)
"""Tasks whose contexts exceed the window of sparse self-speculation. In all other tasks
`sparse_self` reads the whole context, so its drafts are always right."""

CLASSES: Final = {
    "code": "completion",
    "interactive": "completion",
    "chat": "completion",
    "standard": "completion",
    "shared_prefix": "completion",
    "rag": "rewrite",
    "long_document": "long_context",
    "batch": "long_context",
    "*": "completion",
}
"""The task that a class of requests replays.

The choice compares the tokens per step of n-gram drafts, up to 8 tokens long, with prompt lookup in
a replay of texts by Llama-3.1-8B (2026-11-21). Chat has 1.63 tokens per step (ShareGPT: 1.67), and
code completion has 1.72. Retrieval has 2.5 (news: 1.56, code editing: 3.15), and quotations have
3.7."""

TextKey = tuple[str, float, int]
"""Key of a text: task, temperature, index of the prompt."""


class DraftRecorder:
    """A proposer that records the drafts of another proposer, and proposes nothing."""

    def __init__(self, proposer: Proposer) -> None:
        self._proposer = proposer
        self._drafts: dict[int, list[tuple[Draft, int]]] = {}  # by sequence key: draft, position
        self.recorded: dict[str, list[Guess]] = {}  # by request id
        self.texts: dict[str, list[int]] = {}

    def depth_s(self, sequences: int) -> float:
        """Return the cost per depth of the recorded proposer, in seconds."""
        return self._proposer.depth_s(sequences)

    def catch_up_s(self, sequence: Sequence) -> float:
        """Return the catch-up cost of the recorded proposer, in seconds."""
        return self._proposer.catch_up_s(sequence)

    def propose(self, requests: Many[DraftRequest]) -> list[Draft]:
        """Record the drafts of the other proposer, and return no drafts."""
        for request, draft in zip(requests, self._proposer.propose(requests), strict=True):
            drafts = self._drafts.setdefault(request.sequence.key, [])
            drafts.append((draft, len(request.sequence.token_ids)))
        return [NO_DRAFT] * len(requests)

    def forget(self, sequence: Sequence) -> None:
        """Compare the drafts of a finished sequence with its text."""
        self._proposer.forget(sequence)
        tokens, name = sequence.token_ids, sequence.request.request_id
        drafts = self._drafts.pop(sequence.key, [])[:POSITIONS]
        self.recorded[name] = [
            Guess(draft.evidence, draft.agreement, len(draft), _agreed(draft, tokens[at:]))
            for draft, at in drafts
        ]
        self.texts[name] = tokens[sequence.prompt_tokens :].tolist()


def _agreed(draft: Draft, tokens: TokenIds) -> int:
    pairs = zip(draft.token_ids, tokens, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def record_drafts(
    engine: LoadedEngine, name: str, prompts: dict[str, tuple[int, ...]], temperature: float
) -> DraftRecorder:
    """Generate a text for every prompt, with a proposer that drafts at each position."""
    inner = NgramProposer(trees=False) if name == "ngram" else engine.proposers[name]
    recorder = engine.proposers[name] = DraftRecorder(inner)
    plan = SpeculationPlan("bench", SpeculationMode.AUTO, name, SLOTS, "a benchmark")
    for request_id, prompt in prompts.items():
        # The index of the prompt is its seed, as in `bench.engine.proposers`.
        sampling = SamplingParams(
            POSITIONS + SLOTS + 1, int(request_id), temperature, ignore_eos=True
        )
        engine.worker.submit(GenerationRequest(request_id, compact(prompt), sampling, plan))
    for _ in run_until_idle(engine.worker, engine.executor):
        pass
    engine.proposers[name] = inner
    return recorder


def record() -> dict[TextKey, dict[str, list[Guess]]]:
    """Return the drafts of each proposer for each text, up to the start of a loop."""
    found: dict[TextKey, dict[str, list[Guess]]] = {}
    for proposer in PROPOSERS:
        config = WorkerConfig(
            proposer=proposer, speculation=f"fixed:{SLOTS}", kv_bytes=KV_BYTES, max_num_seqs=8
        )
        engine = load_engine(config)
        for task, prompts in tasks(engine.worker.tokenizer).items():
            if proposer == "sparse_self" and task not in SPARSE_TASKS:
                continue
            held_out = {str(i): prompt for i, prompt in enumerate(prompts) if i % 2}
            for temperature in TEMPERATURES:
                recorder = record_drafts(engine, proposer, held_out, temperature)
                for name, recorded_drafts in recorder.recorded.items():
                    kept = recorded_drafts[: loop_start(recorder.texts[name])]
                    if len(kept) >= LEAST_POSITIONS:
                        text = (task, temperature, int(name))
                        found.setdefault(text, {})[proposer] = kept
    return found


def as_file(found: dict[TextKey, dict[str, list[Guess]]]) -> RecordingFile:
    """Return the recording in the simulator's form."""
    facts = provenance()
    keys = ("command", "commit", "device", "torch", "date")
    return RecordingFile(
        format="acceptance/2",
        source="; ".join(f"{key}: {facts[key]}" for key in keys),
        slots=SLOTS,
        classes=CLASSES,
        texts=tuple(
            Text(*key, {name: Columns.of(guesses) for name, guesses in sorted(drafts.items())})
            for key, drafts in sorted(found.items())
        ),
    )


def main() -> None:
    """Record, and write the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True)
    path = parser.parse_args().json
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(as_file(record()).encode())


if __name__ == "__main__":
    main()
