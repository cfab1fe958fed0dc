"""Run a pool for hours under load while its processes, network, files and Redis fail.

    make soak ARGS='--minutes 60 --rate 3'

The run consists of parts. Each part starts a fresh pool and writes a file `part-NNN.json`. A run
that is repeated with the same folder does only the parts that are missing.

    make soak ARGS='--virtual-hours 168'

runs a simulated pool in virtual time instead.

    make soak ARGS='--upgrade-from --rate 2'

upgrades each node of a pool from 0.1.0 under load, without other faults.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import shutil
import sys
from pathlib import Path

from bench.harness.provenance import command_line, provenance
from tests.chaos.part import Settings, run_part
from tests.chaos.pool import Size
from tests.chaos.summary import passed, summary_of
from tests.chaos.upgrade import FIRST_VERSION, UPGRADED, old_tree, run_upgrade
from tests.chaos.virtual.week import Week, run_week


def main() -> int:
    """Run the missing parts, and return 1 if any part has failed."""
    options = _parser().parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.virtual_hours:
        return _run_virtual(options)
    old = options.upgrade_from or options.old
    settings = Settings(
        options.seed,
        options.part_minutes * 60,
        options.rate,
        UPGRADED if options.upgrade_from else Size(),
        options.faults,
        old_tree(old, options.out) if old else None,
    )
    if options.upgrade_from:
        return _run_upgrade(options, settings)
    parts = []
    for number in range(round(options.minutes / options.part_minutes)):
        path = options.out / f"part-{number:03}.json"
        if not path.exists():
            found = asyncio.run(run_part(settings, number, options.out))
            facts = provenance() | {"command": _command(), "old": options.old}
            path.write_text(json.dumps(facts | found, indent=1) + "\n")
        parts.append(json.loads(path.read_text()))
        _report(parts, options.out)
    return int(not all(map(passed, parts)))


def _run_virtual(options: argparse.Namespace) -> int:
    """Run a virtual pool, and return 1 if it has failed."""
    logging.disable()  # the losses of links would fill the terminal
    found = run_week(Week(hours=options.virtual_hours, seed=options.seed))
    facts = provenance() | {"command": _command()}
    text = json.dumps(facts | found, indent=1)
    (options.out / f"virtual-{options.seed}.json").write_text(text + "\n")
    sys.stdout.write(text + "\n")
    return int(bool(found["details"] or found["remains"]))


def _run_upgrade(options: argparse.Namespace, settings: Settings) -> int:
    """Upgrade a pool, and return 1 if it has failed."""
    found = asyncio.run(run_upgrade(settings, options.out))
    facts = provenance() | {"command": _command(), "old": options.upgrade_from}
    (options.out / "upgrade.json").write_text(json.dumps(facts | found, indent=1) + "\n")
    sys.stdout.write(json.dumps(summary_of([found]), indent=1) + "\n")
    return int(not passed(found))


def _report(parts: list[dict], out: Path) -> None:
    """Write the summary of all parts, and print it."""
    last = parts[-1]
    if passed(last):  # the logs explain only failures
        shutil.rmtree(out / f"logs-{last['part']:03}", ignore_errors=True)
    text = json.dumps(summary_of(parts), indent=1)
    (out / "summary.json").write_text(text + "\n")
    sys.stdout.write(f"{text}\n{'' if passed(last) else 'FAILED: ' + str(last['details'])}\n")
    sys.stdout.flush()


def _command() -> str:
    arguments = command_line("", sys.argv[1:]).lstrip()
    return f"make soak ARGS='{arguments}'"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="make soak", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=60.0, help="duration of the load")
    parser.add_argument("--part-minutes", type=float, default=10.0)
    parser.add_argument("--rate", type=float, default=3.0, help="requests per second")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--out", type=Path, default=Path("build/soak"), help="folder of the results of one version"
    )
    parser.add_argument(
        "--no-faults", dest="faults", action="store_false", help="only load, to measure memory"
    )
    parser.add_argument(
        "--upgrade-from",
        nargs="?",
        const=FIRST_VERSION,
        metavar="COMMIT",
        help="upgrade once from this version (without COMMIT: 0.1.0)",
    )
    parser.add_argument("--virtual-hours", type=float, help="hours of a pool in virtual time")
    parser.add_argument("--old", help="commit of the version before an upgrade")
    return parser


if __name__ == "__main__":
    sys.exit(main())
