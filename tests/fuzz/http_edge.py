"""Fuzz the connections of clients with h11 as judge: python -m tests.fuzz.http_edge SECONDS.

Nodes run in this process, in virtual time and without sockets. The seed of a finding reproduces it
(`--seed N --count 1`). The command prints the smallest bytes with the same finding. Fix the cause,
and add the bytes to tests/fuzz/corpus/http_edge/.
"""

from __future__ import annotations

import atexit
import json
import signal
import sys
import threading
import time
from argparse import ArgumentParser
from dataclasses import replace
from itertools import count
from random import Random

from tests.fuzz.http_judge import Finding, Judge
from tests.fuzz.http_nodes import Nodes
from tests.fuzz.http_streams import Sent, sent
from tests.fuzz.target import Target

MOST_FINDINGS = 20
PER_NODE = 20_000
"""Connections before the nodes are replaced, so that their memory stays bounded."""

_judges: list[Judge] = []


def parse(data: bytes) -> None:
    """Judge what both nodes do with bytes, whole and in pieces."""
    if not _judges:
        _judges.append(Judge(Nodes()))
        atexit.register(_judges[0].nodes.close)
    for proxy in (False, True):
        for cuts in ([], [len(data) // 2], list(range(min(len(data), 400)))):
            _judges[0].check(Sent(data, cuts, proxy=proxy))


def finding(judge: Judge, one: Sent) -> str | None:
    """Return what the judge does not accept, or None."""
    try:
        judge.check(one)
    except Finding as error:
        return str(error)
    return None


def smallest(judge: Judge, one: Sent) -> Sent:
    """Return the smallest bytes with some finding that are parts of the given ones."""
    size = max(1, len(one.data) // 2)
    while size:
        begin = 0
        while begin < len(one.data):
            data = one.data[:begin] + one.data[begin + size :]
            cuts = [cut - size * (cut > begin) for cut in one.cuts if cut <= len(data)]
            shorter = replace(one, data=data, cuts=sorted(max(0, cut) for cut in cuts))
            if data and finding(judge, shorter) is not None:
                one = shorter
            else:
                begin += size
        size //= 2
    return one


def main() -> int:
    """Fuzz for some CPU time or until SIGINT, and return 1 if the judge has findings."""
    parser = ArgumentParser(prog="python -m tests.fuzz.http_edge")
    parser.add_argument("seconds", type=float, help="CPU time")
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--count", type=int, help="most connections")
    args = parser.parse_args()
    judge, findings, stopped = Judge(nodes := Nodes()), 0, threading.Event()
    signal.signal(signal.SIGINT, lambda *_: stopped.set())
    for number, seed in enumerate(count(args.seed), 1):
        one = sent(Random(seed))
        found = finding(judge, one)
        if found is not None:
            findings += 1
            sys.stdout.write(f"seed {seed}: {found[:2000]}\n  {smallest(judge, one)}\n")
            sys.stdout.flush()
        late = stopped.is_set() or time.process_time() >= args.seconds
        if late or number == args.count or findings == MOST_FINDINGS:
            break
        if number % PER_NODE == 0:
            nodes.close()
            nodes = judge.nodes = Nodes()
    nodes.close()
    stricter = dict(judge.stricter.most_common(40))
    result: dict[str, object] = {
        "cpu_s": round(time.process_time()),
        "seeds": [args.seed, seed],
        "findings": findings,
    }
    result |= {**judge.counts, "refusals of what h11 accepts": stricter}
    sys.stdout.write(json.dumps(result, indent=1) + "\n")
    return int(bool(findings))


TARGETS = [Target("http_edge", parse)]

if __name__ == "__main__":
    sys.exit(main())
