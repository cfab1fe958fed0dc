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
from pathlib import Path
from typing import Final

from msgspec.structs import replace

from bench.engine.proposers import KV_BYTES, TEMPERATURES, tasks
from bench.harness.loops import loop_start
from bench.harness.provenance import provenance
from draftgate.backends.core.draft_recorder import DraftRecorder
from draftgate.backends.core.drafts import NO_DRAFT, Draft
from draftgate.backends.core.pipeline import run_until_idle
from draftgate.backends.core.proposer import DraftRequest, Proposer
from draftgate.backends.core.sequence import Sequence
from draftgate.backends.engine.load import load_engine
from draftgate.backends.engine.loaded import LoadedEngine
from draftgate.backends.engine.proposers.ngram import NgramProposer
from draftgate.backends.recording import SLOTS, Columns, RecordingFile, Text
from draftgate.backends.token_ids import compact
from draftgate.backends.types import GenerationRequest, SamplingParams
from draftgate.backends.worker_config import WorkerConfig
from draftgate.policies.types import SpeculationMode, SpeculationPlan

POSITIONS: Final = 160
"""Recorded positions per text. Texts are longer, so that the last drafts can be checked."""

LEAST_POSITIONS: Final = 24
"""Minimum number of tokens before a loop. N-grams predict a loop perfectly, so texts that loop
earlier are left out."""

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

NO_DRAFTS: Final = SpeculationPlan("bench", SpeculationMode.OFF, None, 0, "a benchmark")


class SparseDrafts:
    """Keeps the drafts of a proposer that needs the worker's KV cache, and proposes nothing.

    Attributes:
        drafts: by request id and number of tokens.
    """

    def __init__(self, proposer: Proposer) -> None:
        self._proposer = proposer
        self.drafts: dict[tuple[str, int], Draft] = {}

    def depth_s(self, sequences: int) -> float:
        """Return the cost per depth of the kept proposer, in seconds."""
        return self._proposer.depth_s(sequences)

    def catch_up_s(self, sequence: Sequence) -> float:
        """Return the catch-up cost of the kept proposer, in seconds."""
        return self._proposer.catch_up_s(sequence)

    def propose(self, requests: Many[DraftRequest]) -> list[Draft]:
        """Keep the drafts of the proposer, and return no drafts."""
        for request, draft in zip(requests, self._proposer.propose(requests), strict=True):
            self.drafts[_place(request)] = draft
        return [NO_DRAFT] * len(requests)

    def forget(self, sequence: Sequence) -> None:
        """Drop the proposer's state, but not its drafts."""
        self._proposer.forget(sequence)


class KeptDrafts:
    """Proposes the drafts that `SparseDrafts` kept."""

    def __init__(self, drafts: dict[tuple[str, int], Draft]) -> None:
        self._drafts = drafts

    def depth_s(self, sequences: int) -> float:
        """Return 0, because the drafts exist."""
        return 0.0

    def catch_up_s(self, sequence: Sequence) -> float:
        """Return 0, because the drafts exist."""
        return 0.0

    def propose(self, requests: Many[DraftRequest]) -> list[Draft]:
        """Return the kept draft of each sequence, or an empty draft."""
        return [self._drafts.get(_place(request), NO_DRAFT) for request in requests]

    def forget(self, sequence: Sequence) -> None:
        """Do nothing, because the object has no state."""


def _place(request: DraftRequest) -> tuple[str, int]:
    return request.sequence.request.request_id, len(request.sequence.token_ids)


def record_drafts(
    engine: LoadedEngine, prompts: dict[str, tuple[int, ...]], temperature: float, *, sparse: bool
) -> list[Text]:
    """Generate a text for every prompt, and return the texts up to the start of a loop."""
    inner = engine.proposers["sparse_self"]
    kept = engine.proposers["sparse_self"] = SparseDrafts(inner)
    plan = SpeculationPlan("bench", SpeculationMode.AUTO, "sparse_self", SLOTS, "a benchmark")
    proposers = {
        # Chains, because the recordings of other models contain chains as well.
        "ngram": NgramProposer(trees=False),
        "draft_model": engine.proposers["draft_model"],
        **({"sparse_self": KeptDrafts(kept.drafts)} if sparse else {}),
    }
    recorder = DraftRecorder(proposers)
    for request_id, prompt in prompts.items():
        # The index of the prompt is its seed, as in `bench.engine.proposers`.
        sampling = SamplingParams(
            POSITIONS + SLOTS + 1, int(request_id), temperature, ignore_eos=True
        )
        request = GenerationRequest(
            request_id, compact(prompt), sampling, plan if sparse else NO_DRAFTS
        )
        engine.worker.submit(request)
        recorder.begin(request)
    # Drafts are kept during the next step, so the recorder follows after the run.
    deltas = [step.deltas for step in run_until_idle(engine.worker, engine.executor)]
    engine.proposers["sparse_self"] = inner
    tokens: dict[str, list[int]] = {name: [] for name in prompts}
    for request_id, delta in (pair for step in deltas for pair in step):
        tokens[request_id].extend(delta.token_ids)
    texts = [text for step in deltas for text in recorder.observe(step)]
    names = tuple(prompts)  # in the order of the recorder's indexes
    return [text for t in texts if (text := _cut(t, names[t.prompt], tokens))]


def _cut(text: Text, name: str, tokens: dict[str, list[int]]) -> Text | None:
    """Return a text without its first position and its loop, or None if little is left."""
    end = min(POSITIONS, loop_start(tokens[name])) + 1
    if end <= LEAST_POSITIONS:
        return None
    drafts = {
        proposer: Columns.of([text.guess(proposer, at) for at in range(1, end)])
        for proposer in sorted(text.drafts)
    }
    return replace(text, prompt=int(name), drafts=drafts)


def record() -> list[Text]:
    """Return the recorded texts of all tasks."""
    config = WorkerConfig(speculation=f"fixed:{SLOTS}", kv_bytes=KV_BYTES, max_num_seqs=8)
    engine = load_engine(config)
    texts = []
    for task, prompts in tasks(engine.worker.tokenizer).items():
        held_out = {str(i): prompt for i, prompt in enumerate(prompts) if i % 2}
        for temperature in TEMPERATURES:
            found = record_drafts(engine, held_out, temperature, sparse=task in SPARSE_TASKS)
            texts += [replace(text, task=task) for text in found]
    return sorted(texts, key=lambda text: (text.task, text.temperature, text.prompt))


def as_file(texts: list[Text]) -> RecordingFile:
    """Return the recording in the simulator's form."""
    facts = provenance()
    keys = ("command", "commit", "device", "torch", "date")
    return RecordingFile(
        format="acceptance/2",
        source="; ".join(f"{key}: {facts[key]}" for key in keys),
        slots=SLOTS,
        classes=CLASSES,
        texts=tuple(texts),
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
