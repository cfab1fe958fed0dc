"""Fuzz all parsers in turn with Atheris: python -m tests.fuzz SECONDS [TARGET...].

Each target gets an equal share of the time, in a process of its own. libFuzzer mutates inputs, and
keeps those that reach new branches of the Python code in build/fuzz/corpus/. Inputs that fail are
in build/fuzz/found/. Make a finding as small as possible, fix the parser, and commit the input to
tests/fuzz/corpus/.
"""

from __future__ import annotations

import os
import re
import sys
from argparse import ArgumentParser
from pathlib import Path
from random import Random

import atheris

from tests.fuzz.mutation import mutated

with atheris.instrument_imports(include=["draftgate", "prometheus_client", "yaml"]):
    from tests.fuzz.targets import TARGETS

WORK = Path("build") / "fuzz"
FOUND = WORK / "found"

LONGEST_S = 10
"""Seconds after which an input counts as a hang."""

MOST_MB = 3072
"""Memory of a process, in MiB. The engine's imports take 500."""

MOST_BYTES = 1 << 16
"""Maximum size of an input."""

STRUCTURED = 0.7
"""Share of mutations that keep the structure of an input."""


def run_target(name: str, seconds: int) -> None:
    """Fuzz a target until libFuzzer ends this process."""
    target = TARGETS[name]

    def mutate(data: bytes, max_size: int, seed: int) -> bytes:
        random = Random(seed)
        found = mutated(target.form, data, random) if random.random() < STRUCTURED else None
        if found is None or len(found) > max_size:
            return atheris.Mutate(data, max_size)
        return found

    flags = (
        f"-max_total_time={seconds}", f"-timeout={LONGEST_S}", f"-rss_limit_mb={MOST_MB}",
        f"-max_len={MOST_BYTES}", f"-artifact_prefix={FOUND}/{name}-", "-print_final_stats=1",
    )  # fmt: skip
    folders = (str(WORK / "corpus" / name), str(target.corpus))
    atheris.Setup([sys.argv[0], *flags, *folders], target.run, custom_mutator=mutate)
    atheris.Fuzz()


def fuzz(name: str, seconds: int) -> str:
    """Fuzz a target in a child, which need not import anything, and return a line about it."""
    for folder in (WORK / "corpus" / name, FOUND):
        folder.mkdir(parents=True, exist_ok=True)
    log = WORK / f"{name}.log"
    child = os.fork()
    if not child:
        with log.open("wb") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        run_target(name, seconds)
    _, status = os.waitpid(child, 0)
    counts = re.findall(r"number_of_executed_units: (\d+)", log.read_text(errors="replace"))
    ending = "" if status == 0 else f", FAILED: see {log}"
    return f"{name}: {counts[-1] if counts else '?'} inputs in {seconds} s{ending}"


def main() -> int:
    """Fuzz the named targets, and return 1 if an input failed."""
    parser = ArgumentParser(prog="python -m tests.fuzz")
    parser.add_argument("seconds", type=int, help="time of all targets together")
    parser.add_argument("targets", nargs="*", default=list(TARGETS), help=", ".join(TARGETS))
    args = parser.parse_args()
    names = args.targets
    if unknown := set(names) - TARGETS.keys():
        parser.error(f"no target {unknown.pop()}")
    lines = []
    for name in names:
        lines.append(fuzz(name, max(1, args.seconds // len(names))))
        print(lines[-1], flush=True)
    return int(any("FAILED" in line for line in lines))


if __name__ == "__main__":
    sys.exit(main())
