"""Compare sparse self-speculation with n-gram drafts for batches of long contexts.

    draftgate bench long-context --json OUT --html OUT

MagicDec (arXiv 2408.11049) drafts with the target on 512 tokens of each context. A long context
makes a verify step expensive for its KV and not for its tokens, so drafts pay in large batches too.
The study has two parts:

* `batches`: a batch of equal contexts, as in the paper. The speed is that of the steps after all
  prompts, until a tenth of the requests have ended.
* `mixed`: short chats and long documents arrive together at a worker with continuous batching, and
  `auto` has both proposers. Rates are fractions of the throughput without speculation.

Drafts of sparse self-speculation are right as often as MagicDec measured for Llama-3.1-8B on books
(PG-19) at that length of the context. Each token is right independently of others. N-gram drafts
are replayed from other texts of the same model. `--lookups` selects `math`, whose n-gram drafts are
the poorest, or `summary`, which repeats its prompt. No recording of books exists.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise, takewhile
from random import Random
from statistics import fmean
from typing import Any, Final, NamedTuple

from msgspec import structs

from bench.harness.provenance import bench_parser, simulated_provenance, write_results
from draftgate.backends.recording import SLOTS, Columns, Guess, RecordingFile, Text
from draftgate.backends.sim.assembly import BLOCK_TOKENS, SimEnvironment
from draftgate.backends.sim.profile import load_profile
from draftgate.backends.sim.recording import Recording, load_recording
from draftgate.backends.worker_config import WorkerConfig
from draftgate.gateway.cli.simulate.cluster import SimulatedCluster, simulate
from draftgate.gateway.cli.simulate.drawn import Drawn
from draftgate.loadgen.checking.audit import Verdict
from draftgate.loadgen.measuring.metrics import latency_s, tpot_s, ttft_s
from draftgate.loadgen.planning.traces import TraceRow
from draftgate.loadgen.report.html import html_table
from draftgate.loadgen.sending.health import without_full_gc
from draftgate.loadgen.types import PlannedRequest, Record, Slo

NGRAM, SPARSE = "ngram", "sparse_self"

ACCEPTANCE: Final = ((4096, 0.84), (16_384, 0.82), (32_768, 0.81), (100_000, 0.79))
"""Probability that a draft token is right, by tokens of the context: MagicDec with a budget of 512
tokens of StreamingLLM, Llama-3.1-8B, PG-19. Between two lengths the probability is interpolated."""


class Published(NamedTuple):
    """A speed-up that MagicDec reports for self-speculation with StreamingLLM."""

    profile: str
    context: int
    batch: int
    speed: float


PUBLISHED: Final = (
    Published("a100x8-7b", 8192, 32, 1.18),
    Published("a100x8-7b", 8192, 64, 1.48),
    Published("a100x8-7b", 8192, 128, 1.63),
    Published("a100x8-8b", 32_768, 32, 1.22),
    Published("a100x8-8b", 32_768, 64, 1.38),
    Published("a100x8-8b", 32_768, 128, 1.47),
    Published("h100x8-8b", 32_768, 32, 1.23),
    Published("h100x8-8b", 32_768, 64, 1.43),
)
"""Figures of the paper for 8 GPUs in one tensor-parallel group."""

PROFILES: Final = ("a100x8-7b", "a100x8-8b", "h100x8-8b")
BATCHES: Final = (32, 64, 128)
CONTEXTS: Final = (8192, 16_384, 32_768)
VARIANTS: Final = (
    ("off", NGRAM),
    ("fixed:3", NGRAM),
    ("fixed:3", SPARSE),
    ("auto", NGRAM),
    ("auto", SPARSE),
    ("auto", f"{NGRAM},{SPARSE}"),
)
"""Policies with their proposers. MagicDec drafts 3 tokens, or 4 with the largest batches."""

BATCH_OUTPUT: Final = 512
"""Output tokens of a request. `auto` begins without knowing the acceptance, and learns it in the
first tenth of the steps."""

AT_ONCE_RPS: Final = 1e5

LONG, SHORT = "long", "short"
MIXED_LENGTHS: Final = {LONG: (16_384, 256), SHORT: (512, 256)}
"""Tokens of prompts and outputs."""

LONG_SHARE: Final = 0.5
MIXED_RATES: Final = (0.3, 0.6, 0.85)

TEXTS: Final = 64
"""Most texts whose drafts are replayed."""

TITLE: Final = "Sparse self-speculation with long contexts, simulated"


def acceptance(context: int) -> float:
    """Return the probability that a draft token is right for a number of context tokens."""
    if context <= ACCEPTANCE[0][0]:
        return ACCEPTANCE[0][1]
    for (low, at_low), (high, at_high) in pairwise(ACCEPTANCE):
        if context <= high:
            return at_low + (at_high - at_low) * (context - low) / (high - low)
    return ACCEPTANCE[-1][1]


def recorded(contexts: dict[str, int], lookups: str, seed: int) -> Recording:
    """Return texts with drafts of both proposers, one task for each context.

    Args:
        contexts: tokens of the context of each task.
        lookups: recorded task of the n-gram drafts.
        seed: seed of the sparse drafts.
    """
    source = load_recording("llama-3.1-8b")
    recorded_texts = source.texts(lookups, 0.0)[:TEXTS]
    random, texts = Random(seed), list[Text]()
    for task, context in contexts.items():
        chance = acceptance(context)
        for index, text in enumerate(recorded_texts):
            drawn = [_drawn(random, chance) for _ in range(text.length)]
            drafts = {NGRAM: text.drafts[NGRAM], SPARSE: Columns.of(drawn)}
            texts.append(Text(task, 0.0, index, drafts))
    return Recording(RecordingFile(source=source.source, slots=SLOTS, texts=tuple(texts)))


def _drawn(random: Random, chance: float) -> Guess:
    """Draw a sparse draft. Its evidence is constant, as for other drafts that were published."""
    agreed = sum(1 for _ in takewhile(lambda _: random.random() < chance, range(SLOTS)))
    return Guess(1, 0, SLOTS, agreed)


class Study(NamedTuple):
    """The settings of all cells.

    Attributes:
        profile: name of the device.
        lookups: recorded task of the n-gram drafts.
        seed: seed of texts, arrivals and noise.
    """

    profile: str
    lookups: str
    seed: int

    def run(
        self,
        planned: Sequence[PlannedRequest],
        drawn: Drawn,
        config: WorkerConfig,
        recording: Recording,
    ) -> list[Record]:
        """Simulate one worker, whose KV memory holds all of its sequences.

        Raises:
            ValueError: a request was refused.
        """
        longest = max(row.prompt_tokens + row.output_tokens for row in drawn.rows)
        tokens = (longest + SLOTS + 2 * BLOCK_TOKENS) * config.step_limits("cpu").sequences
        config = structs.replace(
            config,
            profile=self.profile,
            max_model_len=longest + 1,
            kv_bytes=tokens * load_profile(self.profile).kv_token_bytes,
        )
        environment = SimEnvironment(self.seed, recording=recording)
        records = simulate(SimulatedCluster(config, 1, environment), planned, to_job=drawn.job)
        if any(record.verdict is not Verdict.OK for record in records):
            raise ValueError(f"a request was refused by {self.profile}")
        return records

    def batch(self, batch: int, context: int) -> dict[str, Any]:
        """Return the speed of each variant relative to `off` for a batch of equal contexts."""
        rows = (TraceRow(0.0, context, BATCH_OUTPUT),) * batch
        drawn, recording = (
            Drawn(rows, self.seed),
            recorded({LONG: context}, self.lookups, self.seed),
        )
        planned = drawn.planned(AT_ONCE_RPS, Slo())
        speeds = dict[str, float]()
        for policy, proposer in VARIANTS:
            # All prompts precede all outputs, so that the whole batch decodes together.
            config = WorkerConfig(
                speculation=policy,
                proposer=proposer,
                batching="prefill_first",
                max_num_seqs=batch,
                max_step_tokens=8192,
            )
            records = self.run(planned, drawn, config, recording)
            speeds[_name(policy, proposer)] = together_tokens_per_s(records)
        base = speeds[_name(*VARIANTS[0])]
        cell = {"profile": self.profile, "batch": batch, "context": context}
        return {
            **cell,
            "acceptance": acceptance(context),
            "off_tokens_per_s": base,
            "speed": {name: speed / base for name, speed in speeds.items()},
            "published": _published(self.profile, context, batch),
        }

    def mixed(self, requests: int, most_sequences: int) -> Iterator[dict[str, Any]]:
        """Yield the mean latencies of each class and variant at each rate."""
        random = Random(self.seed)
        classes = [LONG if random.random() < LONG_SHARE else SHORT for _ in range(requests)]
        drawn = Drawn(tuple(TraceRow(0.0, *MIXED_LENGTHS[one]) for one in classes), self.seed)
        contexts = {name: sizes[0] for name, sizes in MIXED_LENGTHS.items()}
        recording = recorded(contexts, self.lookups, self.seed)
        config = WorkerConfig(max_num_seqs=most_sequences, max_step_tokens=2048)
        off = structs.replace(config, speculation="off", proposer=NGRAM)
        burst = self.run(drawn.planned(AT_ONCE_RPS, Slo()), drawn, off, recording)
        most_rps = requests / max(record.end_s for record in burst)
        for share in MIXED_RATES:
            planned = [
                replace(one, request=replace(one.request, class_name=name))
                for one, name in zip(drawn.planned(share * most_rps, Slo()), classes, strict=True)
            ]
            for policy, proposer in VARIANTS:
                chosen = structs.replace(config, speculation=policy, proposer=proposer)
                records = self.run(planned, drawn, chosen, recording)
                yield {
                    "profile": self.profile,
                    "rate_rps": share * most_rps,
                    "share": share,
                    "variant": _name(policy, proposer),
                    **{name: _class_result(records, name) for name in MIXED_LENGTHS},
                }


def together_tokens_per_s(records: Sequence[Record]) -> float:
    """Return the output rate from the last first token until a tenth of the requests have ended.

    A few requests may end while others wait for their prompt.
    """
    begin_s = max(record.chunks[0].at_s for record in records)
    ends_s = sorted(record.chunks[-1].at_s for record in records)
    end_s = ends_s[len(ends_s) // 10]
    tokens = sum(
        chunk.tokens or 0
        for record in records
        for chunk in record.chunks
        if begin_s < chunk.at_s <= end_s
    )
    return tokens / (end_s - begin_s)


def _class_result(records: Sequence[Record], name: str) -> dict[str, Any]:
    own = [record for record in records if record.planned.request.class_name == name]
    firsts_s = [first_s for record in own if (first_s := ttft_s(record)) is not None]
    times_s = [time_s for record in own if (time_s := tpot_s(record)) is not None]
    outcomes = [record.metrics["speculative_decoding"] for record in own if record.metrics]
    return {
        "latency_s": fmean(map(latency_s, own)),
        "ttft_s": fmean(firsts_s),
        "tpot_s": fmean(times_s),
        "drafted_tokens": sum(one["num_drafted_tokens"] for one in outcomes),
        "accepted_tokens": sum(one["num_accepted_tokens"] for one in outcomes),
    }


def _published(profile: str, context: int, batch: int) -> float | None:
    cell = (profile, context, batch)
    return next((one.speed for one in PUBLISHED if one[:3] == cell), None)


def _name(policy: str, proposer: str) -> str:
    return policy if policy == "off" else f"{policy} {proposer}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run `draftgate bench long-context`."""
    args = _parser().parse_args(arguments)
    batches, mixed = list[dict[str, Any]](), list[dict[str, Any]]()
    with without_full_gc():
        for profile in args.profiles.split(","):
            study = Study(profile, args.lookups, args.seed)
            for context in map(int, args.contexts.split(",")):
                for batch in map(int, args.batches.split(",")):
                    batches.append(study.batch(batch, context))
                    print(*_batch_cells(batches[-1]), flush=True)
        for row in Study(args.mixed_profile, args.lookups, args.seed).mixed(
            args.requests, args.sequences
        ):
            mixed.append(row)
            print(*_mixed_cells(row), flush=True)
    results = {
        "format": "long-context/1",
        **simulated_provenance("long-context", arguments),
        "acceptance": ACCEPTANCE,
        "settings": {
            "lookups": args.lookups,
            "seed": args.seed,
            "batch_output_tokens": BATCH_OUTPUT,
            "mixed_lengths": MIXED_LENGTHS,
            "long_share": LONG_SHARE,
            "requests": args.requests,
            "sequences": args.sequences,
        },
        "batches": batches,
        "mixed": mixed,
    }
    write_results(args, results, TITLE, _body(batches, mixed))


def _batch_cells(row: dict[str, Any]) -> list[str]:
    published = row["published"]
    return [
        *(row["profile"], f"{row['context']:,}", str(row["batch"])),
        *(f"{speed:.2f}" for speed in row["speed"].values()),
        "" if published is None else f"{published:.2f}",
    ]


def _mixed_cells(row: dict[str, Any]) -> list[str]:
    cells = [row["variant"], f"{row['rate_rps']:.2f}"]
    for name in MIXED_LENGTHS:
        one = row[name]
        cells += [f"{one['latency_s']:.2f}", f"{one['ttft_s']:.2f}", f"{one['tpot_s'] * 1e3:.1f}"]
    return cells


def _body(batches: Sequence[dict[str, Any]], mixed: Sequence[dict[str, Any]]) -> Iterator[str]:
    yield f"<h1>{TITLE}</h1>"
    names = [_name(*variant) for variant in VARIANTS]
    yield html_table(
        ["profile", "context", "batch", *names, "MagicDec"], [*map(_batch_cells, batches)]
    )
    heads = [
        f"{name}: {what}"
        for name in MIXED_LENGTHS
        for what in ("latency, s", "TTFT, s", "TPOT, ms")
    ]
    yield html_table(["variant", "requests/s", *heads], [*map(_mixed_cells, mixed)], __doc__ or "")


def _parser() -> argparse.ArgumentParser:
    parser = bench_parser("long-context", __doc__, device=False)
    parser.add_argument("--profiles", default=",".join(PROFILES))
    parser.add_argument("--batches", default=",".join(map(str, BATCHES)))
    parser.add_argument("--contexts", default=",".join(map(str, CONTEXTS)))
    parser.add_argument("--lookups", choices=("math", "summary"), default="math")
    parser.add_argument("--mixed-profile", default="h200-8b")
    parser.add_argument("--requests", type=int, default=200, help="requests of the mixed load")
    parser.add_argument("--sequences", type=int, default=64, help="most sequences of that worker")
    parser.add_argument("--seed", type=int, default=0)
    return parser


if __name__ == "__main__":
    main()
