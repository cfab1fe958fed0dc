"""Compare two versions of the gateway on generated requests.

    python -m tests.differential --baseline PATH [--requests 3000] [--seed 1]

Both versions get the same requests in virtual time, with the same random numbers. The output counts
the differences in responses, events, requests to upstreams, log lines, metrics and decisions. The
exit status is 1 unless `intended.py` describes all of them. build/differential/ has the others.
"""

from __future__ import annotations

import os
import subprocess
import sys
from argparse import ArgumentParser
from collections import Counter, defaultdict
from pathlib import Path

import msgspec

from tests.differential.cases import Generator
from tests.differential.comparison import Difference, compared
from tests.differential.exchange import Case
from tests.differential.intended import intended
from tests.differential.record import Record

ROOT = Path(__file__).resolve().parents[2]
WORK = ROOT / "build" / "differential"
BATCH = 50


def start(tree: Path, cases: Path, observed: Path, batch: int) -> subprocess.Popen[bytes]:
    """Start to observe a version."""
    variables = {
        "PYTHONPATH": f"{tree}{os.pathsep}{ROOT}",
        "PYTHONHASHSEED": "0",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    command = (sys.executable, "-m", "tests.differential.host", cases, observed, str(batch))
    return subprocess.Popen(command, cwd=tree, env=os.environ | variables)


def observe(trees: list[Path], cases: list[Case], batch: int = BATCH) -> list[dict[str, Record]]:
    """Return what each version does with the cases."""
    WORK.mkdir(parents=True, exist_ok=True)
    path = WORK / "cases"
    path.write_bytes(msgspec.msgpack.encode(cases))
    places = [WORK / f"observed-{number}" for number in range(len(trees))]
    started = [start(tree, path, place, batch) for tree, place in zip(trees, places, strict=True)]
    statuses = [process.wait() for process in started]
    if any(statuses):
        raise SystemExit("a version failed")
    return [msgspec.msgpack.decode(p.read_bytes(), type=dict[str, Record]) for p in places]


def report(found: list[Difference]) -> str:
    """Return the differences by kind, with some of each."""
    kinds = defaultdict(list)
    for difference in found:
        kinds[difference.kind].append(difference)
    lines = []
    for kind, group in sorted(kinds.items(), key=lambda item: -len(item[1])):
        lines.append(f"\n== {kind}: {len(group)}")
        lines += [str(difference) for difference in group]
    return "\n".join(lines)


def main() -> int:
    """Compare the versions, and return 1 if a difference is not intended."""
    parser = ArgumentParser(prog="python -m tests.differential")
    parser.add_argument("--baseline", type=Path, required=True, help="a checkout of a version")
    parser.add_argument("--tree", type=Path, default=ROOT, help="the other one (default: this)")
    parser.add_argument("--requests", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--batch", type=int, default=BATCH, help="cases between readings of pages")
    args = parser.parse_args()
    cases = Generator(args.seed).cases(args.requests)
    before, after = observe([args.baseline.resolve(), args.tree.resolve()], cases, args.batch)
    found = compared(cases, before, after)
    reasons = Counter(intended(difference) for difference in found)
    others = [difference for difference in found if intended(difference) is None]
    (WORK / "differences.txt").write_text(report(others), encoding="utf-8")
    print(f"{sum(len(e.methods) for c in cases for e in c.exchanges)} requests, seed {args.seed}")
    for reason, count in reasons.items():
        if reason is not None:
            print(f"{count:6} intended: {reason}")
    for kind, count in Counter(difference.kind for difference in others).most_common():
        print(f"{count:6} NOT INTENDED: {kind}")
    return int(bool(others))


if __name__ == "__main__":
    sys.exit(main())
