"""Measure decode speed with drafts of a fixed acceptance rate, relative to no drafts.

The continuations are from a run without drafts. Every draft length and `auto` then run the same
prompts in the same rounds. Only steps in which the whole batch decodes count.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from collections.abc import Sequence as Many
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import count
from statistics import median
from typing import Any, Final, NamedTuple

from bench.engine.bench_engine import BenchEngine
from bench.engine.cases import weight_bytes
from bench.engine.device import Rates
from bench.engine.serving import (
    BATCHES,
    PLAIN,
    Generation,
    Prompt,
    Serving,
    greedy_requests,
    in_batches,
)
from draftgate.backends.core.drafts import Draft
from draftgate.backends.core.proposer import DraftRequest
from draftgate.backends.core.sequence import Sequence
from draftgate.backends.recording import Text
from draftgate.backends.types import SpeculationOutcome
from draftgate.lab.sim.recording import load_recording
from draftgate.policies.registry import speculation_policy
from draftgate.policies.speculation.planning import MAX_DRAFT_TOKENS
from draftgate.policies.types import SpeculationMode, SpeculationPlan

# --- A proposer for benchmarks that knows the continuation and errs at a chosen rate --------------
#
# The engine still verifies each draft and samples each token. Results are labelled `replay`.


NAME: Final = "replay"


@dataclass(slots=True)
class _Proposal:
    """The latest draft of a sequence and its position."""

    position: int
    token_ids: tuple[int, ...]


@dataclass(slots=True)
class Tested:
    """Counts of tested draft tokens, which follow only correct tokens of their draft."""

    agreed: int = 0
    rejected: int = 0

    @property
    def acceptance(self) -> float | None:
        """Share of accepted tokens among tested tokens, or None without tested tokens."""
        tested = self.agreed + self.rejected
        return self.agreed / tested if tested else None


@dataclass(slots=True)
class ReplayProposer:
    """A proposer of the known continuation of each prompt, with a share of the tokens replaced.

    The wrong tokens are drawn once, independently for each position of each continuation. Each
    tested slot is therefore accepted with the chosen probability. The class implements
    `backends.core.proposer.Proposer`.

    Attributes:
        drafts: drafted continuation by prompt.
        tested: outcome of the drafts since the last reset.
    """

    drafts: dict[tuple[int, ...], tuple[int, ...]]
    tested: Tested = field(default_factory=Tested)
    _latest: dict[int, _Proposal] = field(default_factory=dict)  # by sequence key

    @classmethod
    def of(
        cls,
        continuations: Iterable[tuple[tuple[int, ...], Many[int]]],
        acceptance: float,
        vocab_size: int,
        seed: int = 0,
    ) -> ReplayProposer:
        """Return a proposer of prompts and their continuations.

        Args:
            acceptance: probability that a token stays unchanged.
            vocab_size: size of the vocabulary from which wrong tokens are drawn.
        """
        return cls(
            {
                prompt: corrupted(tokens, acceptance, vocab_size, random.Random(f"{seed} {index}"))
                for index, (prompt, tokens) in enumerate(continuations)
            }
        )

    def depth_s(self, sequences: int) -> float:
        return 0.0

    def catch_up_s(self, sequence: Sequence) -> float:
        return 0.0

    def propose(self, requests: Many[DraftRequest]) -> Many[Draft]:
        return [self._propose(request) for request in requests]

    def forget(self, sequence: Sequence) -> None:
        self._judge(sequence)

    def _propose(self, request: DraftRequest) -> Draft:
        sequence = request.sequence
        self._judge(sequence)
        prompt = tuple(sequence.request.prompt_ids)
        token_ids = self._tokens(prompt, sequence.output_tokens, request.max_tokens)
        if token_ids:
            self._latest[sequence.key] = _Proposal(len(sequence.token_ids), token_ids)
        return Draft(token_ids)

    def _tokens(self, prompt: tuple[int, ...], position: int, most: int) -> tuple[int, ...]:
        """Return the draft for a position of the output."""
        return self.drafts.get(prompt, ())[position : position + most]

    def _judge(self, sequence: Sequence) -> None:
        """Compare the latest draft with the tokens that the sequence has generated since."""
        latest = self._latest.pop(sequence.key, None)
        if latest is None:
            return
        generated = sequence.token_ids[latest.position :]
        for proposed, token in zip(latest.token_ids, generated, strict=False):
            if proposed != token:
                self.tested.rejected += 1
                return
            self.tested.agreed += 1


@dataclass(slots=True)
class RecordedProposer(ReplayProposer):
    """A proposer whose drafts have the lengths and the right tokens of recorded drafts.

    `drafts` has the true continuation of each prompt. The first wrong token of a draft and all
    tokens after it are different from the continuation.

    Attributes:
        name: the proposer in the recording.
        texts: the recorded text that each prompt replays.
        vocab_size: size of the vocabulary.
    """

    name: str = ""
    texts: dict[tuple[int, ...], Text] = field(default_factory=dict)
    vocab_size: int = 2

    def _tokens(self, prompt: tuple[int, ...], position: int, most: int) -> tuple[int, ...]:
        text = self.texts.get(prompt)
        if text is None:
            return ()
        guess = text.guess(self.name, position % text.length).first(most)
        known = self.drafts[prompt][position : position + guess.proposed]
        wrong = ((token + 1) % self.vocab_size for token in known[guess.agreed :])
        return (*known[: guess.agreed], *wrong)


def corrupted(
    tokens: Many[int], acceptance: float, vocab_size: int, rng: random.Random
) -> tuple[int, ...]:
    """Replace each token by a different token with probability `1 - acceptance`."""
    return tuple(
        token if rng.random() < acceptance else (token + rng.randrange(1, vocab_size)) % vocab_size
        for token in tokens
    )


class Replayed(NamedTuple):
    """Settings of the measurement.

    Attributes:
        acceptance: probability that a draft token is right, or the name of a proposer whose drafts
            are in `recording`.
        lengths: fixed draft lengths.
        new_tokens: number of output tokens of each prompt.
        rounds: number of rounds of all policies, whose medians count.
        recording: name or file of recorded drafts.
        batches: numbers of sequences.
    """

    acceptance: float | str
    lengths: tuple[int, ...]
    new_tokens: int
    rounds: int
    recording: str = "llama-3.1-8b"
    batches: tuple[int, ...] = BATCHES

    def proposer(self, continuations: dict[Prompt, list[int]], vocab_size: int) -> ReplayProposer:
        """Return a proposer that knows the continuation of each prompt.

        Raises:
            ValueError: the recording is missing, damaged, or without drafts of the proposer.
        """
        if not isinstance(self.acceptance, str):
            return ReplayProposer.of(continuations.items(), self.acceptance, vocab_size)
        recording = load_recording(self.recording)
        if self.acceptance not in recording.proposers:
            raise ValueError(f"{self.recording} has no drafts of {self.acceptance}")
        # Texts of a task are stored together, so the prompts take texts from all of them in turn.
        tasks = [recording.texts(task, 0.0) for task in recording.tasks]
        texts = (
            tasks[i % len(tasks)][i // len(tasks) % len(tasks[i % len(tasks)])] for i in count()
        )
        return RecordedProposer(
            {prompt: tuple(tokens) for prompt, tokens in continuations.items()},
            name=self.acceptance,
            texts=dict(zip(continuations, texts, strict=False)),
            vocab_size=vocab_size,
        )


@dataclass
class _Runs:
    """The rounds of a policy at a single batch size.

    Attributes:
        rates: tokens per second of each round, or 0 if the prompts never all decoded together.
    """

    rates: list[float] = field(default_factory=list)
    outcome: SpeculationOutcome = field(default_factory=SpeculationOutcome)
    tested: Tested = field(default_factory=Tested)
    tokens: int = 0
    equal: int = 0
    outputs: int = 0


def measure_speedups(
    bench_engine: BenchEngine, settings: Replayed, rates: Rates
) -> list[dict[str, Any]]:
    """Return a row for each policy and batch size of a model."""
    prompts = bench_engine.model.prompts(max(settings.batches))
    with Serving(bench_engine.worker(speculation_policy("off"), {})) as plain:
        generation = plain.run(greedy_requests(prompts, settings.new_tokens, PLAIN))
    continuations = {prompt: generation.outputs[str(index)] for index, prompt in enumerate(prompts)}
    rows = []
    for batch in settings.batches:
        runs = _run_all(bench_engine, settings, in_batches(prompts, batch), continuations)
        rows += [_row(bench_engine, settings, rates, batch, name, runs) for name in runs]
        for row in rows[-len(runs) :]:
            print({"model": bench_engine.model.name, **row}, flush=True)
    return rows


def _policies(settings: Replayed) -> dict[str, int]:
    """Return the maximum draft length by policy."""
    fixed = {f"fixed:{length}": length for length in settings.lengths}
    return {"off": 0, **fixed, "auto": MAX_DRAFT_TOKENS}


def _run_all(
    bench_engine: BenchEngine,
    settings: Replayed,
    groups: Many[Many[Prompt]],
    continuations: dict[Prompt, list[int]],
) -> dict[str, _Runs]:
    policies = _policies(settings)
    runs = {name: _Runs() for name in policies}
    vocab_size = bench_engine.model.config.vocab_size
    with ExitStack() as running:
        servings = {}
        for name in policies:
            proposer = settings.proposer(continuations, vocab_size)
            runs[name].tested = proposer.tested
            engine = bench_engine.worker(speculation_policy(name), {NAME: proposer})
            servings[name] = running.enter_context(Serving(engine))
        for turn in range(settings.rounds):
            order = list(policies.items())
            for name, longest in order if turn % 2 else reversed(order):
                generations = [_run(servings[name], group, longest, settings) for group in groups]
                _count(runs[name], generations, groups, continuations)
    return runs


def _run(serving: Serving, group: Many[Prompt], longest: int, settings: Replayed) -> Generation:
    plan = PLAIN
    if longest:
        plan = SpeculationPlan("bench", SpeculationMode.AUTO, NAME, longest, "a benchmark")
    return serving.run(greedy_requests(group, settings.new_tokens, plan))


def _count(
    runs: _Runs,
    generations: Many[Generation],
    groups: Many[Many[Prompt]],
    continuations: dict[Prompt, list[int]],
) -> None:
    """Add the results of a round."""
    windows = [each.decode_window for each in generations]
    tokens, seconds = (sum(parts) for parts in zip(*windows, strict=True))
    runs.rates.append(tokens / seconds if seconds else 0.0)
    for each, group in zip(generations, groups, strict=True):
        runs.outcome += each.outcome
        for index, prompt in enumerate(group):
            output = each.outputs[str(index)]
            runs.tokens += len(output)
            runs.outputs += 1
            runs.equal += output == continuations[prompt]


def _row(
    bench_engine: BenchEngine,
    settings: Replayed,
    rates: Rates,
    batch: int,
    name: str,
    runs: dict[str, _Runs],
) -> dict[str, Any]:
    own, off = runs[name], runs["off"]
    row: dict[str, Any] = {
        "proposer": None if name == "off" else _label(settings),
        "policy": name,
        "batch": batch,
        "decode_tokens_per_s": round(median(own.rates), 1),
        "equal_outputs": round(own.equal / own.outputs, 3),
    }
    rounds = zip(own.rates, off.rates, strict=True)
    ratios = [mine / plain for mine, plain in rounds if mine and plain]
    if name == "off":
        if batch == 1:
            row["share_of_bandwidth"] = round(
                _bandwidth_share(bench_engine, median(own.rates), rates), 3
            )
        return row
    tested = own.tested
    drafted = own.outcome.num_drafted_tokens
    steps = own.tokens - own.outcome.num_accepted_tokens
    return row | {
        "speedup": round(median(ratios), 3) if ratios else None,
        "acceptance": round(tested.acceptance or 0.0, 3),
        "tested_tokens": tested.agreed + tested.rejected,
        "accepted_of_drafted": round(own.outcome.num_accepted_tokens / max(drafted, 1), 3),
        "tokens_per_step": round(own.tokens / steps, 3),
    }


def _label(settings: Replayed) -> str:
    if isinstance(settings.acceptance, str):
        return f"replay, {settings.acceptance} of {settings.recording}"
    return f"replay, acceptance {settings.acceptance}"


def _bandwidth_share(bench_engine: BenchEngine, tokens_per_s: float, rates: Rates) -> float:
    """Return the share of the bandwidth that the weights alone use."""
    num_bytes = weight_bytes(bench_engine.model.config, bench_engine.model.dtype.itemsize)
    return num_bytes * tokens_per_s / rates.bytes_per_s
