"""Compare whole generations between the modes of the engine and of `transformers`.

All participants generate greedily for the same prompts and the same number of tokens. Times include
prefill. Each round runs all participants in alternating order, and medians count. The benchmark
compares the tokens of each output with those of the engine without drafts. A peer that does not
work on this device reports its error.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Many
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any, Final

from bench.engine.bench_engine import STEP_TOKENS, BenchEngine
from bench.engine.models import Model, StoredModel
from bench.engine.random_model import MOST_PROMPT
from bench.engine.serving import BATCHES, Prompt, Serving, greedy_requests, in_batches
from bench.engine.transformers import TransformersGenerate, continuous_batching, reason
from draftgate.backends.checkpoints import SHIPPED_DRAFT, SHIPPED_MODEL
from draftgate.backends.engine.load import load_engine
from draftgate.backends.engine.loaded import LoadedEngine
from draftgate.backends.worker_config import WorkerConfig
from draftgate.policies.registry import speculation_policy
from draftgate.policies.types import RequestView, SpeculationMode

ENGINE_MODES: Final = (
    SpeculationMode.OFF,
    SpeculationMode.NGRAM,
    SpeculationMode.DRAFT_MODEL,
    SpeculationMode.AUTO,
)
DRAFT_MEMORY_FACTOR: Final = 2
"""Multiple of the memory of all prompts and outputs, which leaves space for pages of a draft model.
"""

Generate = Callable[[Many[Prompt]], list[list[int]]]


@dataclass
class Participant:
    """A way to generate, with its results.

    Attributes:
        is_peer: whether the participant is another engine, which may fail on this device.
        taken_s: seconds of each run.
        failed: error of a peer, or None.
    """

    generate: Generate
    is_peer: bool = False
    taken_s: list[float] = field(default_factory=list)
    outputs: list[list[int]] = field(default_factory=list)
    failed: str | None = None

    def run(self, prompts: Many[Prompt]) -> float:
        """Generate, and return the seconds, or None if a peer fails.

        Raises:
            Exception: the engine of Draftgate failed.
        """
        if self.failed is not None:
            return 0.0
        started_s = time.perf_counter()
        try:
            self.outputs = self.generate(prompts)
        except Exception as error:
            if not self.is_peer:
                raise
            self.failed = reason(error)
        return time.perf_counter() - started_s


def measure_generation(
    bench_engine: BenchEngine, new_tokens: int, rounds: int
) -> list[dict[str, Any]]:
    """Return a row for each participant and batch size."""
    rows: list[dict[str, Any]] = []
    prompts = bench_engine.model.prompts(max(BATCHES))
    with ExitStack() as running:
        serving = running.enter_context(Serving(_worker(bench_engine, new_tokens)))
        for batch in BATCHES:
            with ExitStack() as alone:
                participants = _engine_modes(serving, new_tokens) | _peers(
                    alone, bench_engine.model, batch, new_tokens
                )
                groups = in_batches(prompts, batch)
                _run_all(participants, groups, rounds)
            for row in _rows(participants, batch, new_tokens * sum(map(len, groups))):
                rows.append(row)
                print({"model": bench_engine.model.name, **row}, flush=True)
    return rows


def generation_worker(model: Model, new_tokens: int) -> LoadedEngine:
    """Load a checkpoint as a server does, with all its proposers."""
    longest = MOST_PROMPT + new_tokens
    kv_bytes = model.config.kv_bytes_per_token(model.dtype.itemsize)
    return load_engine(
        WorkerConfig(
            model=None if model.directory == SHIPPED_MODEL else str(model.directory),
            dtype=str(model.dtype).removeprefix("torch."),
            device=model.device.type,
            kv_bytes=DRAFT_MEMORY_FACTOR * max(BATCHES) * longest * kv_bytes,
            max_num_seqs=max(BATCHES),
            max_step_tokens=STEP_TOKENS,
        )
    )


def _worker(bench_engine: BenchEngine, new_tokens: int) -> LoadedEngine:
    if bench_engine.model.directory is None:
        return bench_engine.worker(speculation_policy("auto"), {})
    return generation_worker(bench_engine.model, new_tokens)


def _engine_modes(serving: Serving, new_tokens: int) -> dict[str, Participant]:
    """Return the modes of the engine: no drafts, each proposer of the worker, and `auto`."""
    modes = [SpeculationMode.OFF]
    if serving.engine.proposers:
        modes = [mode for mode in ENGINE_MODES if _offered(mode, serving.engine)]
    return {
        mode.value: Participant(partial(_generate, serving, mode, new_tokens)) for mode in modes
    }


def _offered(mode: SpeculationMode, engine: LoadedEngine) -> bool:
    return mode in {SpeculationMode.OFF, SpeculationMode.AUTO} or mode.value in engine.proposers


def _generate(
    serving: Serving, mode: SpeculationMode, new_tokens: int, prompts: Many[Prompt]
) -> list[list[int]]:
    view = RequestView(len(prompts[0]), new_tokens, 0.0, mode)
    plan = speculation_policy("auto").decide(view, serving.engine.worker.load())
    generation = serving.run(greedy_requests(prompts, new_tokens, plan))
    return [generation.outputs[str(index)] for index in range(len(prompts))]


def _peers(running: ExitStack, model: Model, batch: int, new_tokens: int) -> dict[str, Participant]:
    """Return the modes of `transformers` for a batch. Modes that cannot start have an error."""
    try:
        if batch == 1:
            return _one_by_one(model, new_tokens)
        name, longest = "transformers, continuous batching", MOST_PROMPT + new_tokens
        manager = running.enter_context(continuous_batching(model, batch, longest, new_tokens))
        return {name: Participant(manager.generate, is_peer=True)}
    except Exception as error:  # noqa: BLE001 - a peer may raise anything
        name = "transformers" if batch == 1 else "transformers, continuous batching"
        return {name: Participant(_nothing, is_peer=True, failed=reason(error))}


def _one_by_one(model: Model, new_tokens: int) -> dict[str, Participant]:
    assistant = None
    if model.directory == SHIPPED_MODEL:
        assistant = StoredModel("draft", SHIPPED_DRAFT, model.dtype, model.device)
    theirs = TransformersGenerate(model, new_tokens, assistant)
    found = {"transformers": theirs.plain}
    if model.directory is not None:
        found["transformers, prompt lookup"] = theirs.prompt_lookup
    if assistant is not None:
        found["transformers, assisted"] = theirs.assisted
    return {name: Participant(generate, is_peer=True) for name, generate in found.items()}


def _run_all(participants: dict[str, Participant], groups: list[list[Prompt]], rounds: int) -> None:
    """Run all participants on every group of prompts."""
    outputs: dict[str, list[list[int]]] = {}
    for turn in range(rounds + 1):
        seconds = dict.fromkeys(participants, 0.0)
        outputs = {name: [] for name in participants}
        for group in groups:
            order = list(participants.items())
            for name, participant in order if turn % 2 else reversed(order):
                seconds[name] += participant.run(group)
                outputs[name] += participant.outputs
        if turn:  # the first round is a warm-up
            for name, participant in participants.items():
                participant.taken_s.append(seconds[name])
    for name, participant in participants.items():
        participant.outputs = outputs[name]


def _rows(participants: dict[str, Participant], batch: int, tokens: int) -> list[dict[str, Any]]:
    plain = participants[SpeculationMode.OFF.value]
    rows: list[dict[str, Any]] = []
    for name, participant in participants.items():
        row: dict[str, Any] = {"who": name, "batch": batch}
        if participant.failed is not None:
            rows.append(row | {"failed": participant.failed})
            continue
        row["tokens_per_s"] = round(tokens / median(participant.taken_s), 1)
        row |= agreement(participant.outputs, plain.outputs)
        if not participant.is_peer:
            row["speedup_over"] = {
                peer: round(_ratio(theirs, participant), 3)
                for peer, theirs in participants.items()
                if theirs.is_peer and theirs.failed is None
            }
        rows.append(row)
    return rows


def _ratio(peer: Participant, participant: Participant) -> float:
    """Return the median ratio of the times over the rounds."""
    pairs = zip(peer.taken_s, participant.taken_s, strict=True)
    return median(their_s / our_s for their_s, our_s in pairs)


def agreement(outputs: Many[Many[int]], expected: Many[Many[int]]) -> dict[str, float]:
    """Return the share of equal outputs, and the share of tokens before the first difference."""
    equal = [list(output) == list(other) for output, other in zip(outputs, expected, strict=True)]
    before = sum(map(_common_length, outputs, expected))
    tokens = sum(map(len, expected))
    return {
        "equal_outputs": round(sum(equal) / len(equal), 3),
        "equal_tokens": round(before / tokens, 3),
    }


def _common_length(output: Many[int], expected: Many[int]) -> int:
    """Return the length of the common prefix of two outputs."""
    differing = (i for i, (a, b) in enumerate(zip(output, expected, strict=False)) if a != b)
    return next(differing, min(len(output), len(expected)))


def _nothing(prompts: Many[Prompt]) -> list[list[int]]:
    raise NotImplementedError
