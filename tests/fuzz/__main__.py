"""Fuzz all parsers in turn: python -m tests.fuzz SECONDS [TARGET...].

Each target gets an equal share of the time, in a process of its own. New inputs are kept in
build/fuzz/, and inputs that fail in build/fuzz/found/. Minimise a finding, fix the parser, and
commit the input to tests/fuzz/corpus/.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.fuzz.targets import MODULE_OF, TARGETS

WORK = Path("build") / "fuzz"
FOUND = WORK / "found"

LONGEST_S = 10
"""Seconds after which an input counts as a hang."""

MOST_MB = 3072
"""Memory of a process, in MiB. The engine's imports take 500."""

MOST_BYTES = 1 << 16
"""Maximum size of an input."""


def fuzz(name: str, seconds: int) -> str:
    """Fuzz a target, and return a line about it."""
    grown = WORK / "corpus" / name
    for folder in (grown, FOUND):
        folder.mkdir(parents=True, exist_ok=True)
    flags = (
        f"-max_total_time={seconds}", f"-timeout={LONGEST_S}", f"-rss_limit_mb={MOST_MB}",
        f"-max_len={MOST_BYTES}", f"-artifact_prefix={FOUND}/{name}-", "-print_final_stats=1",
    )  # fmt: skip
    command = (sys.executable, "-m", "tests.fuzz.worker", MODULE_OF[name], name, *flags, grown)
    run = subprocess.run(
        (*command, TARGETS[name].corpus),
        check=False,  # a finding is an exit status
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    output = run.stdout.decode(errors="replace")
    (WORK / f"{name}.log").write_text(output)
    counts = re.findall(r"number_of_executed_units: (\d+)", output)
    ending = "" if run.returncode == 0 else f", FAILED: see {WORK / name}.log"
    return f"{name}: {counts[-1] if counts else '?'} inputs in {seconds} s{ending}"


def main() -> int:
    """Fuzz the named targets, and return 1 if an input failed."""
    names = sys.argv[2:] or list(TARGETS)
    share = max(1, int(sys.argv[1]) // len(names))
    lines = []
    for name in names:
        lines.append(fuzz(name, share))
        print(lines[-1], flush=True)
    return int(any("FAILED" in line for line in lines))


sys.exit(main())
