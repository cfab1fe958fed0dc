"""Fuzz the readers of GGUF files: python -m tests.fuzz.gguf SECONDS.

Children read generated models (`gguf_cases`) under limits of memory and CPU time. The seed of a
finding reproduces it (`--seed N --count 1`). The files of findings are in build/fuzz/found/. Fix
the cause, and add a file to tests/fuzz/corpus/gguf/ or a test.
"""

from __future__ import annotations

import json
import mmap
import os
import resource
import signal
import struct
import sys
import tempfile
import threading
import time
import traceback
from argparse import ArgumentParser
from collections import Counter
from pathlib import Path

import torch

from tests.fuzz.gguf_cases import case_of
from tests.fuzz.gguf_judge import Finding, Judge

FOUND = Path("build") / "fuzz" / "found"

MOST_FINDINGS = 20
BATCH = 2000
"""Cases of a child, whose memory must stay bounded."""

MOST_BYTES = 512 << 20
"""Memory of a child beyond that of its parent, whatever the models claim to have."""

LONGEST_S = 10.0
"""CPU time after which a case counts as a hang."""


class Child:
    """A process that reads cases. It shares the number of the current seed with its parent."""

    def __init__(self, begin: int, end: int, until_s: float) -> None:
        self._seed = mmap.mmap(-1, 8)
        self._result = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the child
        self._begin, self._end, self._until_s = begin, end, until_s

    def run(self) -> tuple[int, dict, list[str]]:
        """Return the last seed, the counts and the findings of the process."""
        pid = os.fork()
        if not pid:
            try:
                self._read_cases()
            except BaseException:  # noqa: BLE001 - a fork must not return
                traceback.print_exc()
            finally:
                os._exit(1)
        _, status = os.waitpid(pid, 0)
        (last,) = struct.unpack("<q", self._seed[:])
        self._result.seek(0)
        written = self._result.read()
        if status:
            how = f"signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else "an exit"
            return last, {}, [f"seed {last}: the process ended by {how}"]
        counts, refusals, findings = json.loads(written)
        return last, {"counts": counts, "refusals": refusals}, findings

    def _read_cases(self) -> None:
        with Path("/proc/self/statm").open(encoding="ascii") as file:
            pages = int(file.read().split()[0])
        most = pages * mmap.PAGESIZE + MOST_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends after this process
        findings: list[str] = []
        with tempfile.TemporaryDirectory() as place:
            judge = Judge(Path(place))
            for seed in range(self._begin, self._end):
                self._seed[:] = struct.pack("<q", seed)
                # The default action of the signal ends the process, also within a library.
                signal.setitimer(signal.ITIMER_PROF, LONGEST_S)
                found = finding(judge, seed)
                if found is not None:
                    findings.append(found)
                if time.process_time() >= self._until_s or len(findings) >= MOST_FINDINGS:
                    break
        signal.setitimer(signal.ITIMER_PROF, 0)
        result = [judge.counts, judge.refusals, findings]
        self._result.write(json.dumps(result).encode())
        self._result.flush()
        os._exit(0)


def finding(judge: Judge, seed: int) -> str | None:
    """Return what the judge does not accept, or None, and keep the files of the case."""
    case = case_of(seed)
    try:
        judge.check(case)
    except Finding as error:
        FOUND.mkdir(parents=True, exist_ok=True)
        for name, data in case.files.items():
            (FOUND / f"gguf-{seed}-{name}").write_bytes(data)
        cause = traceback.format_exception(error.__cause__ or error)[-6:]
        return f"seed {seed}: {error}\n  entry {case.entry}, {case.zeros} zeros\n" + "".join(cause)
    return None


def main() -> int:
    """Fuzz for some CPU time or until SIGINT, and return 1 if there are findings."""
    parser = ArgumentParser(prog="python -m tests.fuzz.gguf")
    parser.add_argument("seconds", type=float, help="CPU time")
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--count", type=int, default=1 << 40, help="most cases")
    args = parser.parse_args()
    torch.set_num_threads(1)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    counts, refusals, stopped = Counter[str](), Counter[str](), threading.Event()
    signal.signal(signal.SIGINT, lambda *_: stopped.set())
    findings, seed = 0, args.seed
    while seed < args.seed + args.count and findings < MOST_FINDINGS and not stopped.is_set():
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        left = args.seconds - used.ru_utime - used.ru_stime
        if left <= 0:
            break
        end = min(seed + BATCH, args.seed + args.count)
        last, results, found = Child(seed, end, left).run()
        counts.update(results.get("counts", {}))
        refusals.update(results.get("refusals", {}))
        findings += len(found)
        for one in found:
            sys.stdout.write(f"{one}\n")
            sys.stdout.flush()
        seed = last + 1
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    result: dict[str, object] = {
        "cpu_s": round(used.ru_utime + used.ru_stime),
        "seeds": [args.seed, seed - 1],
        "findings": findings,
        **counts,
        "refusals": dict(refusals.most_common(60)),
    }
    sys.stdout.write(json.dumps(result, indent=1) + "\n")
    return int(bool(findings))


if __name__ == "__main__":
    sys.exit(main())
