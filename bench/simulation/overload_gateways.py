"""Measure gateways that share a pool in an overload, with random service times.

    draftgate bench overload --servers 32 --gateways 1,2 --json OUT

`overload_servers` describes the pool and its clients. The admission policy and the queue are those
of a gateway, but servers with random service times replace the workers. The values are means over
the seeds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

from bench.harness.provenance import bench_parser, simulated_provenance, write_results
from bench.simulation.overload_servers import (
    Pool,
    attainment,
    goodput,
    idle_while_clients_wait,
    kept_share,
    retry_ratio,
)


def measure(pool: Pool) -> dict[str, Any]:
    """Return the metrics of a single run."""
    clients = pool.run()
    idle_s, unused_share = idle_while_clients_wait(pool, clients)
    return {
        "seed": pool.seed,
        "requests": len(clients),
        "goodput_rps": goodput(pool, clients),
        "attainment": attainment(clients),
        "let_in_on_return": kept_share(clients),
        "retry_over_earliest": retry_ratio(pool, clients),
        "idle_s": idle_s,
        "unused_share": unused_share,
    }


def measure_gateways(
    pool: Pool, gateways: Sequence[int], seeds: Sequence[int]
) -> list[dict[str, Any]]:
    """Return the mean metrics and the single runs for each number of gateways.

    The goodput is relative to that of the first number.
    """
    rows = list[dict[str, Any]]()
    for number in gateways:
        runs = [measure(replace(pool, gateways=number, seed=seed)) for seed in seeds]
        means = {name: fmean(run[name] for run in runs) for name in runs[0] if name != "seed"}
        rows.append({"gateways": number, **means, "runs": runs})
    for row in rows:
        row["goodput_of_first"] = row["goodput_rps"] / rows[0]["goodput_rps"]
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    """Run `draftgate bench overload --servers`."""
    parser = bench_parser("overload", __doc__, device=False)
    parser.add_argument(
        "--servers", type=int, required=True, help="servers with random service times"
    )
    parser.add_argument("--times", type=float, default=3.0, help="rate / capacity of the servers")
    parser.add_argument("--gateways", default="1,2", help="numbers of gateways")
    parser.add_argument(
        "--exchange-s",
        type=float,
        default=Pool.exchange_s,
        help="interval at which gateways exchange appointments",
    )
    parser.add_argument("--seeds", default="1,2,3")
    args = parser.parse_args(arguments)
    pool = Pool(args.times, servers=args.servers, exchange_s=args.exchange_s)
    gateways, seeds = (
        [int(one) for one in text.split(",")] for text in (args.gateways, args.seeds)
    )
    rows = measure_gateways(pool, gateways, seeds)
    for row in rows:
        print({name: value for name, value in row.items() if name != "runs"})
    found = {**simulated_provenance("overload", arguments), "pools": rows}
    write_results(args, found, "Overload of gateways that share a pool", ())


def _numbers(text: str) -> list[int]:
    return [int(one) for one in text.split(",")]
