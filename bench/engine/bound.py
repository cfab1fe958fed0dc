"""Compare speculation policies on a model, cell by cell, and find whether one is slower than `off`.

    python -m bench.engine.bound MODEL --prompts FILE --json OUT [--dtype DTYPE] [--streams 1,4,16]

FILE has a JSON object per line, whose `turns` begin with a user's message, as in Spec-Bench. A cell
has a number of streams and a temperature. In each round of a cell, every policy runs the same
requests on a worker of its own, with one thread and the same weights. A stream sends its next
request when the previous one has ended. Requests have the same number of output tokens, except that
the first ones of the streams are shorter, each by a different amount. So prompts are spread over
the round from the beginning, with and without drafts. Each round has other prompts.

The policies take turns of a fraction of a second. A machine whose speed changes within seconds, or
that does other work, therefore disturbs all of them alike. Speed is tokens per second of CPU time
while all streams are busy, host work and prompts included. It counts from the step in which the
last stream emits its first token.

A ratio is the geometric mean over rounds, with a 95% interval by Student's t distribution.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any, Final, NamedTuple

import torch

from bench.harness.provenance import provenance
from draftgate.backends.core.pipeline import run_until_idle
from draftgate.backends.core.worker import WorkerCore
from draftgate.backends.engine import runner as runner_module
from draftgate.backends.engine.load import load_engine
from draftgate.backends.engine.loaded import LoadedEngine
from draftgate.backends.errors import RequestRejected
from draftgate.backends.token_ids import TokenIds, compact
from draftgate.backends.types import (
    Delta,
    GenerationRequest,
    SamplingParams,
    SpeculationOutcome,
)
from draftgate.backends.worker_config import WorkerConfig
from draftgate.loadgen.measuring.confidence import mean_ratio
from draftgate.policies.registry import speculation_policy
from draftgate.policies.types import RequestView

TURN_S: Final = 0.25
"""CPU time of a turn, or one step if that is longer."""
REQUESTS: Final = 3
LEAST_REQUESTS: Final = 4
"""Requests of a stream in a round, and the least requests of a round."""
MOST_PROMPT_TOKENS: Final = 600
KV_BYTES: Final = 400 << 20
CONTEXT_TOKENS: Final = 4096


class Run(NamedTuple):
    """A policy in a round.

    Attributes:
        tokens_per_s: tokens per second of CPU time while all streams are busy.
        request_s: mean CPU time from the first token of a request to its last one.
        saved_s: mean of the reported seconds that drafts saved a request.
        outcome: drafts of all requests.
        texts: output tokens of each request.
    """

    tokens_per_s: float
    request_s: float
    saved_s: float
    outcome: SpeculationOutcome
    texts: list[list[int]]


Request = tuple[TokenIds, SamplingParams]


class Arm:
    """A policy and its engine, whose clock stands still while other policies run.

    The worker learns from the times of its steps, which must not include those of other policies.

    Attributes:
        policy: name of the policy, and `rule` the policy itself, which plans each request.
        engine: its engine, whose worker is `worker`.
        taken_s: time of all its turns.
    """

    def __init__(
        self, policy: str, engine: LoadedEngine, clock: Callable[[], float] = time.thread_time
    ) -> None:
        assert isinstance(engine.worker, WorkerCore)
        self.policy = policy
        self.worker = engine.worker
        self.taken_s = 0.0
        self.engine = engine
        self._clock = clock
        self.rule = speculation_policy(policy)
        self._resumed_s = 0.0
        self._services = count()

    def take_turn(self, work: Iterator[object]) -> bool:
        """Run steps for `TURN_S`, and return whether there are more."""
        self._resumed_s = self._clock()
        more = True
        while more and self._clock() - self._resumed_s < TURN_S:
            more = next(work, self) is not self
        self.taken_s += self._clock() - self._resumed_s
        return more

    def serve(
        self, requests: Iterator[Request], streams: int
    ) -> Iterator[tuple[float, bool, list[tuple[int, Delta]]]]:
        """Run requests in a number of streams.

        Yields:
            For each step, the time at its end, whether all streams are busy, and its deltas with
            the indices of their requests.
        """
        tenant = f"tenant-{next(self._services)}"  # no prefix is shared with earlier calls
        indices: dict[str, int] = {}

        def submit() -> bool:
            request = next(requests, None)
            if request is None:
                return False
            prompt, sampling = request
            view = RequestView(len(prompt), sampling.max_tokens, sampling.temperature)
            plan = self.rule.decide(view, self.worker.load())
            request_id = f"{tenant}-{len(indices)}"
            indices[request_id] = len(indices)
            self.worker.submit(
                GenerationRequest(request_id, prompt, sampling, plan, tenant=tenant), self.now_s()
            )
            return True

        full = all(submit() for _ in range(streams))
        for step in run_until_idle(self.worker, self.engine.executor, self.now_s):
            for _, delta in step.deltas:
                if delta.outcome is not None:
                    full = submit() and full
            yield self.now_s(), full, [(indices[name], delta) for name, delta in step.deltas]

    def run(self, requests: list[Request], streams: int, runs: list[Run]) -> Iterator[None]:
        """Run requests, yield after each step, and add the run."""
        started_s = full_s = 0.0
        begun: dict[int, float] = {}
        texts: list[list[int]] = [[] for _ in requests]
        request_s: list[float] = []
        emitted, outcome = 0, SpeculationOutcome()
        for now_s, full, deltas in self.serve(iter(requests), streams):
            if full and len(begun) >= streams:
                emitted += sum([len(delta.token_ids) for _, delta in deltas])
                full_s = now_s
            for index, delta in deltas:
                begun.setdefault(index, now_s)
                texts[index] += delta.token_ids
                if delta.outcome is not None:
                    outcome += delta.outcome
                    request_s.append(now_s - begun[index])
            if not emitted:
                started_s = now_s
            yield
        tokens_per_s, saved_s = emitted / (full_s - started_s), outcome.saved_s / len(requests)
        runs.append(Run(tokens_per_s, fmean(request_s), saved_s, outcome, texts))

    def now_s(self) -> float:
        """Return the time of all turns until now."""
        return self.taken_s + self._clock() - self._resumed_s


def take_turns(busy: dict[Arm, Iterator[object]]) -> None:
    """Let policies run their steps in turns of equal length until all have ended."""
    begun_s = {arm: arm.taken_s for arm in busy}
    while busy:
        arm = min(busy, key=lambda one: one.taken_s - begun_s[one])
        if not arm.take_turn(busy[arm]):
            del busy[arm]


def measure_cell(
    arms: list[Arm], rounds: list[list[TokenIds]], streams: int, sampling: SamplingParams
) -> dict[str, Any]:
    """Return the row of a cell. The first policy is the one with which all others are compared."""
    runs: dict[str, list[Run]] = {arm.policy: [] for arm in arms}
    for prompts in rounds:
        requests = [
            (prompt, replace(sampling, seed=index, max_tokens=_tokens(index, streams, sampling)))
            for index, prompt in enumerate(prompts)
        ]
        take_turns({arm: arm.run(requests, streams, runs[arm.policy]) for arm in arms})
    plain = runs[arms[0].policy]
    return {
        "streams": streams,
        "temperature": sampling.temperature,
        "tokens_per_cpu_s": round(fmean(one.tokens_per_s for one in plain), 1),
        "request_s": round(fmean(one.request_s for one in plain), 3),
        "policies": {arm.policy: compare(plain, runs[arm.policy]) for arm in arms[1:]},
    }


def _tokens(index: int, streams: int, sampling: SamplingParams) -> int:
    """Return the output tokens of a request, which are fewer for the first ones of the streams."""
    return max(sampling.max_tokens * min(index + 1, streams) // streams, 2)


def compare(plain: list[Run], runs: list[Run]) -> dict[str, Any]:
    """Return the figures of a policy, relative to those without drafts."""
    request_s = fmean(one.request_s for one in runs)
    pairs = [
        pair
        for base, one in zip(plain, runs, strict=True)
        for pair in zip(base.texts, one.texts, strict=True)
    ]
    return {
        **ratio_of([one.tokens_per_s for one in runs], [one.tokens_per_s for one in plain]),
        "drafted": sum(one.outcome.num_drafted_tokens for one in runs),
        "accepted": sum(one.outcome.num_accepted_tokens for one in runs),
        "measured_saved_s": round(fmean(one.request_s for one in plain) - request_s, 3),
        "reported_saved_s": round(fmean(one.saved_s for one in runs), 3),
        "same_texts": sum(one == other for one, other in pairs) / len(pairs),
    }


def ratio_of(speeds: Sequence[float], others: Sequence[float]) -> dict[str, Any]:
    """Return the geometric mean of the rounds' ratios of speeds, with a 95% interval."""
    ratios = [one / other for one, other in zip(speeds, others, strict=True)]
    mean, *interval = mean_ratio(ratios)
    return {
        "ratio": round(mean, 3),
        "interval": [round(bound, 3) for bound in interval if len(ratios) > 1],
        "rounds": [round(ratio, 3) for ratio in ratios],
    }


def read_prompts(worker: WorkerCore, file: Path) -> Iterator[TokenIds]:
    """Yield the prompts of a file in endless turns, as chats if the model has a template.

    Long prompts are omitted. Neighbours in the file are of one task, so they are spread.
    """
    messages = [json.loads(line)["turns"][0] for line in file.read_text("utf-8").splitlines()]
    for place in count():
        message = messages[place * 79 % len(messages)]
        try:
            text = worker.tokenizer.render_chat([{"role": "user", "content": message}])
        except RequestRejected:  # the model completes texts
            text = message
        tokens = worker.tokenizer.encode(text, add_special_tokens=text is message)
        if len(tokens) <= MOST_PROMPT_TOKENS:
            yield compact(tokens)


def load_arms(policies: Sequence[str], model: str, streams: int, dtype: str) -> list[Arm]:
    """Load an engine for each policy. All run the same weights.

    Where a copy of the weights lies in memory can change its speed by a tenth.
    """
    engines = [
        load_engine(cpu_config(model, streams, dtype=dtype, speculation=policy))
        for policy in policies
    ]
    arms = [Arm(*one) for one in zip(policies, engines, strict=True)]
    share_weights(arms)
    return arms


def share_weights(arms: Sequence[Arm]) -> None:
    """Let all arms run the weights of the first one."""
    for arm in arms[1:]:
        vars(arm.engine.executor)["_decoder"] = vars(arms[0].engine.executor)["_decoder"]


def learn_costs_from(clock: Callable[[], float]) -> None:
    """Let workers learn the costs of steps from a clock, such as CPU time on a busy machine."""
    vars(runner_module)["time"] = SimpleNamespace(perf_counter=clock)


def cpu_config(
    model: str,
    streams: int,
    *,
    dtype: str = "auto",
    exact: bool = False,
    kv_bytes: int = KV_BYTES,
    speculation: str = "auto",
    quantization: str = "auto",
) -> WorkerConfig:
    """Return the configuration of a worker with one thread for up to `streams` streams."""
    return WorkerConfig(
        model=model,
        dtype=dtype,
        exact=exact,
        device="cpu",
        threads=1,
        kv_bytes=kv_bytes,
        speculation=speculation,
        quantization=quantization,
        max_num_seqs=max(streams, 2),
        max_model_len=CONTEXT_TOKENS,
    )


def model_parser(document: str | None) -> argparse.ArgumentParser:
    """Return the parser of a benchmark of a model, which the docstring of its module describes."""
    parser = argparse.ArgumentParser(description=document and document.partition("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--dtype", default="auto")
    return parser


def main() -> None:
    """Run the benchmark."""
    parser = model_parser(__doc__)
    parser.add_argument("--policies", default="off,auto")
    parser.add_argument("--streams", default="1,4,16")
    parser.add_argument("--temperatures", default="0,0.7")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    learn_costs_from(time.thread_time)
    torch.set_num_threads(1)
    streams = [int(number) for number in options.streams.split(",")]
    arms = load_arms(options.policies.split(","), options.model, max(streams), options.dtype)
    prompts = read_prompts(arms[0].worker, options.prompts)
    rows = []
    card = arms[0].engine.served.card
    facts = {**provenance(), "numerics_class": card.numerics_class}
    for number in streams:
        for temperature in map(float, options.temperatures.split(",")):
            requests = max(number * REQUESTS, LEAST_REQUESTS)
            rounds = [[next(prompts) for _ in range(requests)] for _ in range(options.rounds)]
            sampling = SamplingParams(
                options.tokens, seed=0, temperature=temperature, ignore_eos=True
            )
            rows.append(measure_cell(arms, rounds, number, sampling))
            print(rows[-1], flush=True)
            options.json.write_text(json.dumps({**facts, "cells": rows}, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
