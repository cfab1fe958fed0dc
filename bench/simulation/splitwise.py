"""Compare clusters of H100 and A100 machines as Splitwise does, at fixed rates.

    draftgate bench splitwise --times perf_model.csv --trace TRACE --json OUT

Splitwise (Patel et al., ISCA 2024) computes prompts on fast machines and outputs on cheap ones.
The study simulates a fifth of its clusters, with Llama-2-70B on the 8 GPUs of each machine. Step
times are fitted to the measurements of its simulator, by tokens, sequences and context of the
batch. All clusters get the same requests at every rate, from each of the seeds.

The throughput of a cluster is the highest rate at which 90% of the requests meet 3 times the TTFT
and 1.5 times the TPOT that the request has on an idle A100. Beside this joint figure, each rate has
the nine limits of the paper: TTFT, time between tokens and latency at P50, P90 and P99, as
multiples of those on an idle A100.
"""

from __future__ import annotations

import csv
import json
import math
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median
from tempfile import TemporaryDirectory
from typing import Any, Final

import numpy as np
from msgspec import structs

from bench.harness.provenance import bench_parser, simulated_provenance
from bench.harness.study import running_study
from draftgate.backends.sim.kv_link import LOCAL_LINK, KvLink
from draftgate.lab.plan.goodput import POOLS, Simulation
from draftgate.lab.plan.machines import CONFIG
from draftgate.lab.plan.sources import Drawn, Requests, TraceSource
from draftgate.lab.planning.deployments import Deployment, Group
from draftgate.loadgen.measuring.confidence import student_quantile
from draftgate.loadgen.measuring.metrics import tpot_s, ttft_s
from draftgate.loadgen.measuring.slo import meets_slo
from draftgate.loadgen.planning.traces import TraceRow, read_trace
from draftgate.loadgen.search.rate_fit import dispersion
from draftgate.loadgen.sending.health import without_full_gc
from draftgate.loadgen.types import PlannedRequest, Record, Slo
from draftgate.policies.types import Role

SHARE: Final = 0.9
BRACKET_RPS: Final = 2
"""Distance of the rates of a bracket."""

TTFT_TIMES, TPOT_TIMES = 3.0, 1.5
"""Limits of the joint figure, in multiples of an idle A100. They are the paper's limits at P90."""

NINE: Final = {
    "ttft": {50: 2.0, 90: 3.0, 99: 6.0},
    "tbt": {50: 1.25, 90: 1.5, 99: 5.0},
    "e2e": {50: 1.25, 90: 1.5, 99: 5.0},
}
"""The paper's limits by metric and percentile, in multiples of an idle A100."""

CLEAR: Final = 0.1
"""Distance of the first seed's share below `SHARE` at which no further seed is simulated."""

WARM_UP: Final = 0.1
"""Share of the requests, the first ones, that do not count, because the machines are empty."""

KV_TOKEN_BYTES: Final = 327_680
"""Bytes of the keys and values of a token of Llama-2-70B: 2 x 80 layers x 8 heads x 128 x 2."""

WEIGHT_BYTES: Final = 138e9
READ_SHARE: Final = 0.8
LINK_BYTES_S: Final = 25e9
"""Bandwidth between two machines, 200 Gbit/s."""

MOST_TOKENS: Final = 2048
"""Largest step of a machine, as in Splitwise."""


@dataclass(frozen=True, slots=True)
class MachineKind:
    """A machine with 8 GPUs, with the prices and the power of splitwise-sim.

    Attributes:
        hardware: its name in the measurements.
        read_bytes_s: memory bandwidth of all GPUs.
    """

    name: str
    hardware: str
    read_bytes_s: float
    usd_per_hour: float
    power_w: float


H100: Final = MachineKind("h100", "h100-80gb", 8 * 3.35e12, 38.08, 4400.0)
A100: Final = MachineKind("a100", "a100-80gb", 8 * 2.039e12, 17.68, 2480.0)


@dataclass(frozen=True, slots=True)
class Times:
    """Measured seconds of prompts by length, and of decode steps by batch, at a context."""

    prompt_s: Mapping[int, float]
    decode_s: Mapping[int, float]
    decode_context: float = 512 + 128 / 2

    @classmethod
    def read(cls, file: Path, kind: MachineKind) -> Times:
        """Return the medians of Llama-2-70B on 8 GPUs.

        Raises:
            OSError: the file cannot be read.
        """
        prompts, decodes = defaultdict[int, list[float]](list), defaultdict[int, list[float]](list)
        with file.open(newline="", encoding="utf-8") as text:
            for row in csv.DictReader(text):
                found = row["model"], row["hardware"], row["tensor_parallel"]
                if found != ("llama2-70b", kind.hardware, "8"):
                    continue
                batch, prompt = int(row["batch_size"]), int(row["prompt_size"])
                if batch == 1:
                    prompts[prompt].append(float(row["prompt_time"]) / 1e3)
                if prompt == 512 and row["token_size"] == "128":
                    decodes[batch].append(float(row["token_time"]) / 1e3)
        prompt_s, decode_s = (
            {key: median(one) for key, one in by.items()} for by in (prompts, decodes)
        )
        return cls(prompt_s, decode_s)

    def profile(self, kind: MachineKind) -> dict[str, Any]:
        """Return a `profile/2` that is fitted to the times.

        The seconds of a step are a table of its tokens, plus terms for the KV tokens that it reads,
        for sequences, and for pairs of tokens. The table follows prompts of up to `MOST_TOKENS`,
        and the shortest decode step. Longer prompts give the seconds of a pair, and larger batches
        those of a sequence.
        """
        kv_token_s = KV_TOKEN_BYTES / (READ_SHARE * kind.read_bytes_s)
        pair_s = self._pair_s()
        known = {
            tokens: seconds - pair_s * tokens**2 / 2
            for tokens, seconds in self.prompt_s.items()
            if tokens <= MOST_TOKENS
        }
        known[1] = self.decode_s[1] - kv_token_s * self.decode_context
        # A measured time that exceeds that of a longer prompt is replaced by it.
        descending = [known[tokens] for tokens in sorted(known, reverse=True)]
        points = np.minimum.accumulate(descending)[::-1]
        buckets = (1, 2, 4, 8, *range(16, MOST_TOKENS + 1, 16))
        table = np.interp(buckets, sorted(known), points)
        left = {
            batch: seconds
            - float(np.interp(batch, sorted(known), points))
            - kv_token_s * batch * self.decode_context
            for batch, seconds in self.decode_s.items()
        }
        # Least squares of relative errors.
        weights = {batch: 1.0 / self.decode_s[batch] ** 2 for batch in left}
        sequence_s = sum(weights[b] * b * over for b, over in left.items()) / sum(
            weights[b] * b * b for b in left
        )
        return {
            "format": "profile/2",
            "device": f"8 x {kind.hardware}",
            "model": "llama-2-70b",
            "dtype": "float16",
            "source": "fitted to the medians of splitwise-sim's perf_model.csv (8f99e7d)",
            "token_buckets": buckets,
            "step_s": table.tolist(),
            "kv_token_s": kv_token_s,
            "sequence_s": max(sequence_s, 0.0),
            "prefill_attention_s": pair_s,
            "kv_token_bytes": KV_TOKEN_BYTES,
            "kv_bytes": int(0.9 * 640e9 - WEIGHT_BYTES),
            "price_per_hour_usd": kind.usd_per_hour,
            "power_w": kind.power_w,
        }

    def _pair_s(self) -> float:
        """Return the seconds of a pair of tokens, from prompts of several steps."""
        products = squares = 0.0
        for tokens, seconds in self.prompt_s.items():
            chunks = tokens // MOST_TOKENS
            if chunks > 1:  # least squares of relative errors
                pairs = MOST_TOKENS**2 * chunks * (chunks - 1) / 2 / seconds
                products += pairs * (1.0 - chunks * self.prompt_s[MOST_TOKENS] / seconds)
                squares += pairs**2
        return max(products / squares, 0.0)

    def alone_s(self, row: TraceRow) -> tuple[float, float]:
        """Return the TTFT and the time between tokens of a request on an idle machine."""
        lengths = sorted(self.prompt_s)
        ttft_s = np.interp(row.prompt_tokens, lengths, [self.prompt_s[one] for one in lengths])
        return float(ttft_s), self.decode_s[1]


@dataclass(frozen=True, slots=True)
class SlowdownSource:
    """Requests whose targets are multiples of their own times on an idle machine."""

    trace: TraceSource
    idle: Times

    def requests(self, rate_rps: float, seed: int, count: int) -> Requests:
        """See `lab.plan.sources.Source`."""
        drawn = Drawn.from_rows(self.trace.rows, count, seed)

        def with_targets(one: PlannedRequest) -> PlannedRequest:
            ttft_s, token_s = self.idle.alone_s(drawn.rows[one.index])
            slo = Slo(ttft_s=TTFT_TIMES * ttft_s, tpot_s=TPOT_TIMES * token_s)
            return replace(one, request=replace(one.request, slo=slo))

        return Requests(map(with_targets, drawn.planned(rate_rps, Slo())), drawn.job)


@dataclass(frozen=True, slots=True)
class Cluster:
    """Machines of the study with their batching policy, and the first rate to try."""

    name: str
    groups: tuple[Group, ...]
    batching: str
    first_rps: int

    @property
    def deployment(self) -> Deployment:
        """The machines."""
        return Deployment(self.groups)

    @classmethod
    def parse(cls, text: str) -> Cluster:
        """Return the cluster of a text such as `h100:8/prefill_first` or `h100:3+a100:8@25`.

        Raises:
            ValueError: the text has another form.
        """
        name, _, first_rps = text.partition("@")
        machines, _, batching = name.partition("/")
        parts = [part.partition(":") for part in machines.split("+")]
        if len(parts) > 2 or any(name not in {"h100", "a100"} for name, *_ in parts):
            raise ValueError(f"--clusters: expected h100:8 or h100:3+a100:8, not {text!r}")
        roles = (Role.ANY,) if len(parts) == 1 else (Role.PREFILL, Role.DECODE)
        groups = tuple(
            Group(name, role, int(count))
            for (name, _, count), role in zip(parts, roles, strict=True)
        )
        return cls(name, groups, batching or "slack", int(first_rps or 20))


@dataclass(frozen=True, slots=True)
class Study:
    """The settings of all clusters."""

    source: SlowdownSource
    files: Mapping[str, str]
    requests: int
    seeds: Sequence[int]

    def throughput(self, cluster: Cluster) -> dict[str, Any]:
        """Return the highest whole rate at which `SHARE` of the requests meet their targets.

        Rates are bracketed and bisected, because the same requests meet fewer targets at a higher
        rate.
        """
        tried: dict[int, dict[str, Any]] = {}
        rate, low, high, started_s = cluster.first_rps, 0, 0, time.process_time()
        while rate > 0 and rate not in tried:
            found = tried[rate] = self.at_rate(cluster, rate)
            print(cluster.name, line_of(found), flush=True)
            low, high = (rate, high) if found["share"] >= SHARE else (low, rate)
            if low and high:
                rate = (low + high) // 2
            else:
                rate = low + BRACKET_RPS if low else high - BRACKET_RPS
        ends = [[one["rate_rps"], *one["interval"]] for one in tried.values()]
        prices = {"h100": H100.usd_per_hour, "a100": A100.usd_per_hour}
        powers = {"h100": H100.power_w / 1e3, "a100": A100.power_w / 1e3}
        return {
            "cluster": cluster.name,
            "deployment": str(cluster.deployment),
            "batching": cluster.batching,
            "usd_per_hour": round(cluster.deployment.total(prices), 2),
            "power_kw": round(cluster.deployment.total(powers), 2),
            "throughput_rps": low or None,
            "interval_rps": [
                max((rate for rate, least, _ in ends if least >= SHARE), default=None),
                min((rate for rate, _, most in ends if most < SHARE), default=None),
            ],
            "nine_limits_rps": max(
                (rate for rate, one in tried.items() if one["nine_met"]), default=None
            ),
            "cpu_s": round(time.process_time() - started_s, 1),
            "rates": [tried[rate] for rate in sorted(tried)],
        }

    def at_rate(self, cluster: Cluster, rate_rps: int) -> dict[str, Any]:
        """Simulate a rate with all seeds, and return the joint share and the nine limits."""
        config = structs.replace(CONFIG, batching=cluster.batching, max_step_tokens=MOST_TOKENS)
        link = KvLink(LINK_BYTES_S, LOCAL_LINK.latency_s)
        counted, met = list[list[Record]](), list[list[bool]]()
        for seed in self.seeds:
            simulation = Simulation(self.source, self.files, POOLS, link, config)
            requests = self.source.requests(rate_rps, seed, self.requests)
            with without_full_gc():
                run = simulation.records(cluster.deployment, requests, seed)
            counted.append(run[int(WARM_UP * len(run)) :])
            met.append(list(map(meets_slo, counted[-1])))
            if fmean(met[0]) < SHARE - CLEAR:
                break
        share, (low, high) = fmean(map(fmean, met)), share_interval(met)
        limits = nine_limits([record for run in counted for record in run], self.source.idle)
        return {
            "rate_rps": rate_rps,
            "share": round(share, 4),
            "interval": [round(low, 4), round(high, 4)],
            "by_seed": [round(fmean(one), 4) for one in met],
            "slowdowns": limits,
            "nine_met": all(one["met"] for by in limits.values() for one in by.values()),
        }


def nine_limits(records: Sequence[Record], idle: Times) -> dict[str, dict[str, Any]]:
    """Return the slowdown of each metric at each percentile, and whether it is within the limit."""
    slowdowns: dict[str, list[float]] = {metric: [] for metric in NINE}
    for record in records:
        slo = record.planned.request.slo
        first_s, token_s = ttft_s(record), tpot_s(record)
        assert slo.ttft_s is not None
        assert first_s is not None
        idle_ttft_s, idle_token_s = slo.ttft_s / TTFT_TIMES, idle.decode_s[1]
        tokens = record.planned.request.max_tokens
        slowdowns["ttft"].append(first_s / idle_ttft_s)
        if token_s is not None:
            slowdowns["tbt"].append(token_s / idle_token_s)
        idle_s = idle_ttft_s + (tokens - 1) * idle_token_s
        slowdowns["e2e"].append((record.end_s - record.scheduled_s) / idle_s)
    return {
        metric: {
            f"p{percent}": {"slowdown": round(found, 3), "met": found < most}
            for percent, most in limits.items()
            for found in [float(np.percentile(slowdowns[metric], percent))]
        }
        for metric, limits in NINE.items()
    }


def share_interval(met: Sequence[Sequence[bool]]) -> tuple[float, float]:
    """Return the 95% interval of the mean share of runs, with the correlation within a run."""
    share, count = fmean(map(fmean, met)), sum(map(len, met))
    spread = dispersion(met)
    deviation = math.sqrt(max(share * (1.0 - share), 1.0 / count) * spread.factor / count)
    half = student_quantile(max(spread.freedom, 8)) * deviation
    return max(share - half, 0.0), min(share + half, 1.0)


def line_of(rate: Mapping[str, Any]) -> str:
    """Return a rate as a line."""
    low, high = rate["interval"]
    missed = [
        f"{metric} {percent} {one['slowdown']:.2f}"
        for metric, by in rate["slowdowns"].items()
        for percent, one in by.items()
        if not one["met"]
    ]
    return (
        f"{rate['rate_rps']:g}/s: {rate['share']:.1%} ({low:.1%} to {high:.1%}) met both targets,"
        f" {9 - len(missed)} of 9 limits" + (f", not {', '.join(missed)}" if missed else "")
    )


CLUSTERS: Final = (
    *("h100:8@32", "h100:8/prefill_first@18", "a100:14@14", "a100:14/prefill_first@11"),
    *("h100:3+a100:8@25", "h100:4+a100:7@26", "h100:5+a100:5@18"),
)
"""Clusters of about 35 kW, as in the paper, each with its first rate."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run `draftgate bench splitwise`."""
    parser = bench_parser("splitwise", __doc__)
    parser.add_argument("--times", type=Path, required=True, help="perf_model.csv of splitwise-sim")
    parser.add_argument("--trace", type=Path, required=True, help="lengths of the requests")
    parser.add_argument("--clusters", default=",".join(CLUSTERS))
    parser.add_argument("--requests", type=int, default=1500, help="requests of each run")
    parser.add_argument("--seeds", type=int, default=2)
    args = parser.parse_args(arguments)
    facts = simulated_provenance("splitwise", arguments)
    times = {kind: Times.read(args.times, kind) for kind in (H100, A100)}
    source = SlowdownSource(TraceSource(read_trace(args.trace), Slo()), times[A100])
    with TemporaryDirectory() as folder:
        files = {}
        for kind, one in times.items():
            file = Path(folder, f"{kind.name}.json")
            file.write_text(json.dumps(one.profile(kind)), encoding="utf-8")
            files[kind.name] = str(file)
        study = Study(source, files, args.requests, range(args.seeds))
        results: dict[str, Any] = {
            "format": "splitwise/1",
            **facts,
            "profiles": {kind.name: one.profile(kind)["source"] for kind, one in times.items()},
            "settings": {
                "share": SHARE,
                "ttft_times": TTFT_TIMES,
                "tpot_times": TPOT_TIMES,
                "requests": args.requests,
                "seeds": args.seeds,
            },
            "clusters": [],
        }
        clusters = [Cluster.parse(text) for text in args.clusters.split(",")]
        with running_study(args.json, results, "clusters") as progress:
            for done, cluster in enumerate(clusters, 1):
                row = study.throughput(cluster)
                results["clusters"].append(row)
                print(
                    f"{row['deployment']}, {row['batching']}: {row['throughput_rps']} requests/s"
                    f" ({row['interval_rps']}) for {row['usd_per_hour']:.2f} USD/h"
                )
                progress.report("simulating", done, len(clusters))


if __name__ == "__main__":
    main()
