"""Test and measure gateways in front of real vLLM servers on a CPU.

    draftgate bench fleet DIR --json OUT [--only SECTION]

DIR has vLLM for CPUs in `vllm/` and the checkpoints `smollm2/` and `gemma3/`. The command starts
all servers itself, on free ports of the loopback interface. Each vLLM has one computing thread, on
a core of its own if the machine has two. The sections are:

- `models`: servers with a model each, among them llama.cpp's if DIR has `llama/llama-server` and
  `smollm2-q4_1.gguf`, the list of models, aliases and unknown names.
- `fallbacks`: the other model responds to prompts that are too long, to chats of a model that
  cannot chat, and while a server is stopped.
- `failures`: one of two equal servers is stopped, killed or drained under 32 streams, without and
  with continued streams.
- `prefixes`: requests with shared prefixes, routed by KV cache events, earlier placements, load, or
  in turns.
- `speculation`: one of two servers drafts, and the gateway chooses the server of each request.

The arms of a section take turns, and only ratios within a run are comparable. The results are
written after each part of a section. `--smoke` runs every section with few requests.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, NamedTuple

from rich.console import Console
from rich.table import Table

from bench.fleet import failures, models, prefixes, speculation
from bench.harness.provenance import (
    bench_parser,
    busy_share,
    cpu_name,
    simulated_provenance,
    write_results,
)
from bench.harness.vllm import MODEL, is_installed

Rows = list[list[str]]


class Section(NamedTuple):
    """A section of the command.

    Attributes:
        measure: runs it in a folder with the models and a folder for files, and saves its results.
        table: returns the rows of its table, with the header.
        smoke: options of `measure` that make it short.
    """

    measure: Callable[..., None]
    table: Callable[[Mapping[str, Any]], Rows]
    smoke: Mapping[str, Any]


SECTIONS: Final = {
    "models": Section(models.measure, models.table, {}),
    "fallbacks": Section(models.measure_fallbacks, models.fallback_table, {}),
    "failures": Section(failures.measure, failures.table, {}),
    "prefixes": Section(prefixes.measure, prefixes.table, {"rounds": 1, "requests": 6}),
    "speculation": Section(speculation.measure, speculation.table, {"rounds": 1, "loads": (1, 2)}),
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run `draftgate bench fleet`."""
    options = _parser().parse_args(arguments)
    directory = options.directory.resolve()
    if not is_installed(directory) or not (directory / models.OTHER).exists():
        raise SystemExit(
            f"draftgate: {options.directory} must have vllm/bin/vllm, {MODEL}/ and {models.OTHER}/"
        )
    results: dict[str, Any] = {
        "format": "fleet/1",
        **simulated_provenance("fleet", arguments),
        "device": cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "servers": f"vLLM {vllm_version(directory)} for CPUs, one thread each",
        "busy_share_before": round(busy_share(), 3),
    }
    failed = []
    for name in options.only or SECTIONS:
        section = SECTIONS[name]
        print(f"{name}: starting the servers")
        begin_s = time.monotonic()

        def save(found: Mapping[str, Any], name: str = name, begin_s: float = begin_s) -> None:
            seconds = round(time.monotonic() - begin_s, 1)
            results[name] = {"seconds": seconds, **found}
            write_results(options.json, results)

        run = partial(section.measure, **section.smoke) if options.smoke else section.measure
        with TemporaryDirectory(prefix="fleet-") as folder:
            try:
                run(directory, Path(folder), save)
            except Exception as error:  # noqa: BLE001 - the other sections still run
                failed.append(name)
                print(f"{name}: {type(error).__name__}: {error}")
                _print_logs(Path(folder))
                continue
        show(name, section.table(results[name]))
    if failed:
        sys.exit(1)


def _parser() -> argparse.ArgumentParser:
    parser = bench_parser("fleet", __doc__)
    parser.add_argument(
        "directory", type=Path, metavar="DIR", help="folder with vllm/, smollm2/ and gemma3/"
    )
    parser.add_argument(
        "--only", action="append", choices=SECTIONS, help="run only this section; repeatable"
    )
    parser.add_argument("--smoke", action="store_true", help="few requests, without measurements")
    return parser


def vllm_version(directory: Path) -> str:
    """Return the version of the installed vLLM, or `unknown`."""
    found = sorted(directory.glob("vllm/lib/python3*/site-packages/vllm-*.dist-info"))
    return found[-1].name.split("-")[1].removesuffix(".dist") if found else "unknown"


def show(name: str, rows: Rows) -> None:
    """Print a table."""
    head, *lines = rows
    table = Table(title=name, title_justify="left")
    for column in head:
        table.add_column(column)
    for line in lines:
        table.add_row(*line)
    Console(width=150).print(table)


def _print_logs(folder: Path) -> None:
    """Print the ends of the servers' logs, which the temporary folder does not keep."""
    for log in sorted(folder.glob("*.log")):
        lines = log.read_text(errors="replace").splitlines()[-15:]
        print(f"--- {log.name}", *lines, sep="\n")


if __name__ == "__main__":
    main()
