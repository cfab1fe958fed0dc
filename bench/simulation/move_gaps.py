"""Simulate figure 10 of Llumnix: the gap of a moved stream, by the length of its context.

    draftgate bench move-gaps --json OUT

The simulation has two workers and no noise. It runs the part `gaps` of `draftgate bench moves` in
virtual time. The profiles are fitted to the times in the figure, and links have the bandwidth of
its copies, 2.55 GB/s. The time to compute a context is therefore an input, and the gap is a result.

Each profile is simulated with an exact numerics class, in which the destination begins before the
source stops, and without one.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any, Final

from msgspec import structs

from bench.gateway.moved_streams import dispatching
from bench.gateway.moves import measure_gaps
from bench.harness.provenance import bench_parser, simulated_provenance, write_results
from bench.simulation.rescheduling import DEVICES
from draftgate.backends.sim.assembly import SimEnvironment, SimWorker
from draftgate.backends.sim.backend import SimBackend
from draftgate.backends.sim.profile import load_profile
from draftgate.backends.sim.virtual_time import run_virtual
from draftgate.backends.worker_config import WorkerConfig
from draftgate.gateway.assembly import WaitingRules
from draftgate.loadgen.report.html import html_table

PROFILES: Final = ("a10-7b", "a10-30b")
CONTEXTS: Final = (256, 512, 1024, 2048, 4096, 8192)
MODEL_LEN: Final = 12_288
ROUNDS: Final = 5


async def measure(device: str, tokens: int, rounds: int, *, exact: bool) -> dict[str, Any]:
    """Return the gaps of moved streams.

    Args:
        device: name of a profile in `DEVICES`.
        exact: whether the workers have an exact numerics class.
    """
    environment = SimEnvironment(belief_error=0.0, roofline=False, delivers_tokens=True)

    def build(config: WorkerConfig) -> SimWorker:
        worker = environment.build_worker(config)
        capabilities = replace(worker.card.capabilities, exact=exact)
        return replace(worker, card=replace(worker.card, capabilities=capabilities))

    config = WorkerConfig(
        profile=str(DEVICES / f"{device}.json"), speculation="off", max_model_len=MODEL_LEN
    )
    configs = [structs.replace(config, device_index=index) for index in range(2)]
    factory = partial(SimBackend, build=build)
    async with dispatching(factory, configs, WaitingRules(admission="none")) as (node, fleet):
        gaps = await measure_gaps(node, fleet, tokens, rounds, MODEL_LEN)
    return {"device": device, "exact": exact, "tokens": tokens, **gaps}


def rows(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield and print the results of each profile, with and without an exact class, by length."""
    for device, exact, tokens in product(args.devices, (True, False), args.contexts):
        row = run_virtual(measure(device, tokens, args.rounds, exact=exact))
        gap_ms, compute_ms = 1e3 * row["median_extra_gap_s"], 1e3 * row["median_compute_s"]
        print(f"{device}, exact {exact}, {tokens} tokens: {gap_ms:.1f} ms, {compute_ms:.0f} ms")
        yield row


def main(arguments: Sequence[str] | None = None) -> None:
    """Run `draftgate bench move-gaps`."""
    parser = bench_parser("move-gaps", __doc__, device=False)
    parser.add_argument("--devices", nargs="+", default=PROFILES)
    parser.add_argument("--contexts", nargs="+", type=int, default=CONTEXTS)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    args = parser.parse_args(arguments)
    results = {
        "format": "move-gaps/1",
        **simulated_provenance("move-gaps", arguments),
        "profiles": {
            one: load_profile(str(DEVICES / f"{one}.json")).source for one in args.devices
        },
        "rows": list(rows(args)),
    }
    shown = ("device", "exact", "tokens", "median_extra_gap_s", "median_gap_s", "median_compute_s")
    table = [[str(row[name]) for name in shown] for row in results["rows"]]
    write_results(args, results, "Gaps of moved streams, simulated", [html_table(shown, table)])


if __name__ == "__main__":
    main()
