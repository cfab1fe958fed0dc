"""Measure refusals, retry times and the success of retries in an overload, in virtual time.

    draftgate bench overload --json OUT

The gateway's own queue and admission run in front of simulated workers. Requests arrive for a
minute. The last rate is a multiple of the capacity, which is the peak of goodput (`--times`). A
refused client retries at the requested time until it is admitted. Goodput counts requests that met
their TTFT and TPOT targets, measured from the admitted attempt. The study also computes the
earliest feasible retry of a refused client in hindsight, from actual service times (`earliest_s`),
and how long the server was idle while clients waited (`idle_metrics`).

`overload_gateways` describes `--servers`, and `overload_real` describes `--real`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, Final

from bench.harness.provenance import bench_parser, simulated_provenance, write_results
from bench.simulation import overload_gateways
from bench.simulation.overload_clients import Overload
from bench.simulation.overload_metrics import overload_metrics
from draftgate.backends.worker_config import WorkerConfig
from draftgate.policies.types import ServiceLevel

FACTORS: Final = "0.5,0.7,0.8,0.9,1.0,1.1,1.3,1.6,2.0,3.0"
"""Default rates as multiples of the nominal rate."""

TIMES: Final = 3.0
"""Default rate of the overload as a multiple of the peak of goodput, the capacity."""


def measure(overload: Overload, rates_rps: Sequence[float], times: float) -> dict[str, Any]:
    """Return the metrics of all rates and of the overload.

    Args:
        times: rate of the overload as a multiple of the peak of goodput.
    """
    rows = [overload_metrics(overload, rate, overload.run(rate)) for rate in rates_rps]
    peak = max(rows, key=lambda row: row["goodput_rps"])
    rate = times * peak["goodput_rps"]
    over = overload_metrics(overload, rate, overload.run(rate))
    return {
        "rates": rows,
        "peak": {key: peak[key] for key in ("rate_rps", "goodput_rps")},
        "overload": {**over, "goodput_of_peak": over["goodput_rps"] / peak["goodput_rps"]},
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Run `draftgate bench overload`."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if "--real" in given:
        from bench.gateway import overload_real

        overload_real.main(given)
        return
    if "--servers" in given:
        overload_gateways.main(given)
        return
    parser = bench_parser("overload", __doc__)
    parser.add_argument("--rate", type=float, default=16.0, help="nominal requests per second")
    parser.add_argument(
        "--factors", default=FACTORS, help="multiples of --rate to find the peak of goodput"
    )
    parser.add_argument("--workload", default="chat")
    parser.add_argument("--seats", type=int, default=64)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--gateways", type=int, default=1, help="gateways that share the workers")
    parser.add_argument("--ttft-ms", type=float, default=2000.0)
    parser.add_argument("--tpot-ms", type=float, default=None)
    parser.add_argument(
        "--priorities",
        default="0",
        help="priorities of the classes, for example --priorities=-1,0,1",
    )
    parser.add_argument(
        "--times", type=float, default=TIMES, help="rate of the overload / peak goodput"
    )
    parser.add_argument("--admission", default="deadline")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(arguments)
    tpot_s = None if args.tpot_ms is None else args.tpot_ms / 1e3
    overload = Overload(
        WorkerConfig(profile=args.profile, max_num_seqs=args.seats, max_model_len=16_384),
        tuple(
            ServiceLevel(args.ttft_ms / 1e3, tpot_s, int(priority))
            for priority in args.priorities.split(",")
        ),
        args.workload,
        args.seed,
        args.workers,
        args.admission,
        gateways=args.gateways,
    )
    found = {
        **simulated_provenance("overload", arguments),
        **measure(
            overload,
            [float(factor) * args.rate for factor in args.factors.split(",")],
            args.times,
        ),
    }
    for row in (*found["rates"], found["overload"]):
        print(row)
    write_results(args, found, "Overload", ())


if __name__ == "__main__":
    main()
