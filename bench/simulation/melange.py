"""Compute the cheapest mixes of GPUs for short, long and mixed requests, as in a paper.

    draftgate bench melange --json OUT

Mélange (Griggs et al., arXiv 2404.14527) serves Llama-2-7B on L4, A10G, A100 and H100. For rates of
1 to 32 requests/s and two TPOT targets, the study compares the cheapest mix with each type alone,
for the host costs of several engines. As in the paper, the targets hold for mean rates, without
capacity for bursts, and no mix is simulated.

The lengths are log-normal, with published means: Arena has those of LMSYS-Chat-1M (Zheng et al.,
arXiv 2309.11998), and PubMed those of its articles and abstracts (Cohan et al., NAACL 2018), with
1.35 tokens per word. 80% of the mixed requests are those of Arena, and 20% those of PubMed.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from random import Random
from typing import Any, Final

from bench.harness.provenance import bench_parser, simulated_provenance
from bench.harness.study import running_study
from draftgate.lab.plan.machines import Rentable, with_engine
from draftgate.lab.plan.solver import silent_solver
from draftgate.lab.planning.histogram import PlannedLength
from draftgate.lab.planning.load_mix import LoadPlanner, Offer
from draftgate.lab.planning.throughput import Targets

PROFILES: Final = ("l4-7b", "a10g-7b", "a100-7b", "h100-7b")
RATES: Final = (1, 2, 4, 8, 16, 32)
TARGETS_S: Final = (0.12, 0.04)
REQUESTS: Final = 4000

Lengths = tuple[float, float, float, float]
"""Mean prompt and output in tokens, and the standard deviations of their logarithms."""

ARENA: Final = (69.5, 214.5, 1.2, 0.9)
PUBMED: Final = (1.35 * 3016, 1.35 * 203, 0.5, 0.4)
DATASETS: Final[Mapping[str, Mapping[Lengths, float]]] = {
    "Arena": {ARENA: 1.0},
    "PubMed": {PUBMED: 1.0},
    "mixed": {ARENA: 0.8, PUBMED: 0.2},
}

MOST_TOKENS: Final = (12_000, 2000)
"""Longest prompt and output, which the KV memory of an A10G or L4 holds once."""

PAPER: Final = {
    ("Arena", 0.12): "15-77%",
    ("Arena", 0.04): "9-68%",
    ("PubMed", 0.12): "15-33%",
    ("PubMed", 0.04): "2-22%",
    ("mixed", 0.12): "13-51%",
    ("mixed", 0.04): "4-51%",
}
"""Savings against single types in the paper."""


def lengths(dataset: str, seed: int) -> list[PlannedLength]:
    """Return requests of a dataset."""
    random, parts = Random(seed), DATASETS[dataset]
    kinds = random.choices(list(parts), list(parts.values()), k=REQUESTS)

    def drawn(mean: float, sigma: float, most: int) -> int:
        tokens = round(random.lognormvariate(math.log(mean) - sigma**2 / 2, sigma))
        return min(max(tokens, 1), most)

    most_prompt, most_output = MOST_TOKENS
    return [
        PlannedLength(
            float(index), drawn(prompt, in_prompt, most_prompt), drawn(out, in_out, most_output)
        )
        for index, (prompt, out, in_prompt, in_out) in enumerate(kinds)
    ]


def rows(engine: str | None, seeds: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Yield the mixes of all datasets, targets, rates and seeds."""
    names = with_engine(PROFILES, engine)
    rented = {name: Rentable.load(name, "ngram") for name in names}
    offers = {
        name: Offer(one.machine(), one.price, None, lambda _bucket: ())
        for name, one in rented.items()
    }
    for seed in seeds:
        for dataset in DATASETS:
            requests = lengths(dataset, seed)
            for target_s in TARGETS_S:
                planner = LoadPlanner.from_requests(requests, offers, Targets(tpot_s=target_s))
                for rate in RATES:
                    mix = planner.mix(float(rate))
                    alone = {name: planner.mix(float(rate), name) for name in names}
                    costs = {name: one.cost_per_hour for name, one in alone.items() if one.feasible}
                    yield {
                        "engine": engine,
                        "seed": seed,
                        "dataset": dataset,
                        "tpot_s": target_s,
                        "rate_rps": rate,
                        "counts": {name: n for name, n in mix.counts.items() if n},
                        "usd_per_hour": round(mix.cost_per_hour, 3),
                        "alone_usd_per_hour": {n: round(cost, 3) for n, cost in costs.items()},
                        "saved_to_best": round(1.0 - mix.cost_per_hour / min(costs.values()), 4),
                        "saved_to_dearest": round(1.0 - mix.cost_per_hour / max(costs.values()), 4),
                    }


def table(found: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield a row for each engine, dataset and target, in Markdown."""
    yield "| engine | lengths | TPOT | mixes of several types | to best | to dearest | paper |"
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    cells: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for one in found:
        cells.setdefault((one["engine"], one["dataset"], one["tpot_s"]), []).append(one)
    for (engine, dataset, target_s), several in cells.items():
        mixed = sum(len(one["counts"]) > 1 for one in several)
        saved = [
            f"{min(shares):.0%} to {max(shares):.0%}"
            for key in ("saved_to_best", "saved_to_dearest")
            for shares in [[one[key] for one in several]]
        ]
        target = f"{1e3 * target_s:.0f} ms"
        cell = [engine or "profile", dataset, target, f"{mixed} of {len(several)}", *saved]
        yield "| " + " | ".join([*cell, PAPER[dataset, target_s]]) + " |"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run `draftgate bench melange`."""
    parser = bench_parser("melange", __doc__)
    parser.add_argument("--engines", default="vllm-2024,vllm,draftgate")
    parser.add_argument("--seeds", type=int, default=2)
    args = parser.parse_args(arguments)
    engines, seeds, started_s = args.engines.split(","), range(args.seeds), time.process_time()
    total = len(engines) * len(seeds) * len(DATASETS) * len(TARGETS_S) * len(RATES)
    results: dict[str, Any] = {
        "format": "melange/1",
        **simulated_provenance("melange", arguments),
        "cpu_s": None,
        "profiles": {
            name: Rentable.load(name, "ngram").profile.source
            for engine in engines
            for name in with_engine(PROFILES, engine)
        },
        "rows": [],
    }
    with running_study(args.json, results, "rates") as progress:
        with silent_solver():
            for row in (row for engine in engines for row in rows(engine, seeds)):
                results["rows"].append(row)
                progress.report("mixes", len(results["rows"]), total)
        results["cpu_s"] = round(time.process_time() - started_s, 1)
    print("\n".join(table(results["rows"])))


if __name__ == "__main__":
    main()
