"""Measure how much time drafts cost on a model whose requests, proposer or machine mislead `auto`.

    python -m bench.engine.adversaries MODEL --prompts FILE --json OUT [--streams 4,16]

The cases are prompts of random tokens, a temperature of 1.5, requests that are predictable and
unpredictable in turn, a proposer that is certain of random tokens, and a machine whose memory other
processes read and write for half of the time. `off` and `auto` take turns as in
`bench.engine.bound`. The figure is the speed of `auto` relative to `off` in the worst period of
`WINDOW_S` seconds, beside the whole run. Engines reach the same tokens at different times, so `off`
also runs on a second engine. The difference between the two is noise.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import count, takewhile
from pathlib import Path
from typing import Any, Final

import torch

from bench.engine.bound import (
    Arm,
    Request,
    cpu_config,
    learn_costs_from,
    model_parser,
    read_prompts,
    share_weights,
    take_turns,
)
from bench.harness.provenance import provenance
from draftgate.backends.core.drafts import Draft
from draftgate.backends.core.proposer import DraftRequest
from draftgate.backends.engine.load import load_engine
from draftgate.backends.engine.loaded import LoadedEngine
from draftgate.backends.token_ids import TokenIds, compact
from draftgate.backends.types import SamplingParams
from draftgate.backends.worker_config import WorkerConfig

WINDOW_S: Final = 30.0
CASES: Final = ("random", "hot", "alternating", "liar", "disturbed")
RANDOM_TOKENS: Final = 64
LIE_TOKENS: Final = 8
TOKENS: Final = 96
DISTURBED_S: Final = 20.0
"""Seconds of each period in which other processes do or do not run."""

DISTURBER: Final = """
import sys, time, torch
torch.set_num_threads(1)
one, other = torch.zeros(1 << 26), torch.zeros(1 << 26)
while True:
    time.sleep(float(sys.argv[1]))
    end_s = time.monotonic() + float(sys.argv[1])
    while time.monotonic() < end_s:
        one.copy_(other)
"""


def requests_of(
    case: str, prompts: Iterator[TokenIds], vocab_size: int, sampling: SamplingParams
) -> Iterator[Request]:
    """Yield the requests of a case."""
    rng = random.Random(0)
    for index in count():
        prompt = next(prompts)
        noise = compact([rng.randrange(vocab_size) for _ in range(RANDOM_TOKENS)])
        # Unequal lengths, because prompts that begin at the same time stay together otherwise.
        tokens = rng.randint(TOKENS // 2, TOKENS * 3 // 2)
        own = replace(sampling, seed=index, max_tokens=tokens)
        if case == "random":
            yield noise, replace(own, temperature=1.5)
        elif case == "hot":
            yield prompt, replace(own, temperature=1.5)
        elif case == "alternating" and index % 2:
            yield compact(noise[:4].tolist() * 16), own
        elif case == "alternating":
            yield noise, replace(own, temperature=1.5)
        else:
            yield prompt, own


def make_liar(engine: LoadedEngine, vocab_size: int) -> None:
    """Let the n-gram proposer of an engine draft random tokens as if it were certain of them."""
    rng = random.Random(1)

    def propose(requests: Sequence[DraftRequest]) -> list[Draft]:
        return [
            Draft(
                tuple(rng.randrange(vocab_size) for _ in range(min(LIE_TOKENS, one.max_tokens))),
                evidence=rng.randint(1, 32),
                agreement=1000,
            )
            for one in requests
        ]

    vars(engine.proposers["ngram"])["propose"] = propose


@contextmanager
def disturber() -> Iterator[None]:
    """Run a process that uses the memory, with pauses."""
    command = [sys.executable, "-c", DISTURBER, str(DISTURBED_S)]
    with subprocess.Popen(command) as process:  # noqa: S603 - our own code
        try:
            yield
        finally:
            process.kill()


Progress = list[tuple[float, int]]
"""Seconds of a policy, and the tokens until then."""


def tokens_at(progress: Progress, second: float) -> float:
    """Return the tokens until a second, interpolated between two steps."""
    place = bisect_right(progress, second, key=lambda one: one[0])
    (first_s, first), (next_s, following) = progress[place - 1], progress[place]
    return first + (following - first) * (second - first_s) / (next_s - first_s)


def worst_window(plain: Progress, other: Progress, seconds: float) -> float:
    """Return the least relative speed of a policy in a period of `WINDOW_S`, by seconds."""
    worst, second = 9.0, 0.0
    while second + WINDOW_S <= seconds:
        speeds = [
            tokens_at(one, second + WINDOW_S) - tokens_at(one, second) for one in (other, plain)
        ]
        worst = min(worst, speeds[0] / speeds[1])
        second += 1.0
    return worst


def run_case(
    arms: dict[str, Arm], requests: dict[str, Iterator[Request]], streams: int, seconds: float
) -> dict[str, Progress]:
    """Run the requests of a case on each engine for some seconds, in turns."""
    progress: dict[str, Progress] = {name: [(0.0, 0)] for name in arms}

    def serve(name: str) -> Iterator[None]:
        arm, begun_s = arms[name], arms[name].now_s()
        timely = takewhile(lambda _: arm.now_s() - begun_s < seconds, requests[name])
        for now_s, _, deltas in arm.serve(timely, streams):
            tokens = sum([len(delta.token_ids) for _, delta in deltas])
            progress[name].append((now_s - begun_s, progress[name][-1][1] + tokens))
            yield

    take_turns({arm: serve(name) for name, arm in arms.items()})
    return progress


def measure(
    case: str, config: WorkerConfig, file: Path, streams: int, seconds: float
) -> dict[str, Any]:
    """Return the row of a case."""
    clock = time.perf_counter if case == "disturbed" else time.thread_time
    learn_costs_from(clock)
    arms: dict[str, Arm] = {}
    requests: dict[str, Iterator[Request]] = {}
    sampling = SamplingParams(TOKENS, seed=0, ignore_eos=True)
    for name in ("off", "off again", "auto"):
        engine = load_engine(config)
        arms[name] = arm = Arm(name.split()[0], engine, clock)
        vocab_size = arm.worker.tokenizer.vocab_size
        if case == "liar":
            make_liar(engine, vocab_size)
        requests[name] = requests_of(case, read_prompts(arm.worker, file), vocab_size, sampling)
    share_weights(list(arms.values()))
    with disturber() if case == "disturbed" else nullcontext():
        progress = run_case(arms, requests, streams, seconds)
    figures: dict[str, Any] = {}
    for name in ("off again", "auto"):
        totals = [tokens_at(progress[one], seconds) for one in (name, "off")]
        worst = worst_window(progress["off"], progress[name], seconds)
        figures[name] = {"ratio": round(totals[0] / totals[1], 3), "worst": round(worst, 3)}
    return {"case": case, "streams": streams, "seconds": seconds, **figures}


def main() -> None:
    """Run the benchmark."""
    parser = model_parser(__doc__)
    parser.add_argument("--streams", default="4,16")
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--seconds", type=float, default=90.0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for streams in map(int, options.streams.split(",")):
        config = cpu_config(options.model, streams, dtype=options.dtype)
        for case in options.cases.split(","):
            rows.append(measure(case, config, options.prompts, streams, options.seconds))
            print(rows[-1], flush=True)
            facts = {**provenance(), "cases": rows}
            options.json.write_text(json.dumps(facts, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
