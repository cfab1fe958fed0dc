"""Run nodes whose instructions Valgrind counts.

    valgrind --tool=callgrind --instr-atstart=no python -m tests.performance.counted LIBRARY

Each line of standard input has the options of a node, as JSON. The process forks for each node,
because imports take long under Valgrind, and writes the process id of the node. A node writes a
line after each of these signals:

- SIGURG moves the node's time by `ADVANCE_NS`, so that its timers fire.
- SIGWINCH writes the instructions since the last SIGWINCH into a file.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import signal
import sys
from collections.abc import Callable

import draftgate.backends.openai.upstream
import draftgate.backends.sim.assembly
import draftgate.gateway.cli.server  # noqa: F401
from draftgate.gateway.cli import main

ADVANCE_NS = 2_000_000_000
"""The time of each advance. With two seconds, almost every timer fires once per advance. Otherwise
some batches would include more timers than others."""


def _answer(number: signal.Signals, command: Callable[[], object]) -> None:
    """Run a command when a signal arrives, and then write a line."""

    def handle(*_: object) -> None:
        # A search for garbage happens in some batches and not in others.
        gc.disable()
        command()
        os.write(sys.stdout.fileno(), b"done\n")

    signal.signal(number, handle)


def run_nodes(library: ctypes.CDLL) -> None:
    """Run a node in a new process for each line of standard input."""
    for line in sys.stdin:
        if pid := os.fork():
            os.write(sys.stdout.fileno(), f"{pid}\n".encode())
            os.waitpid(pid, 0)
        else:
            _answer(signal.SIGURG, lambda: library.advance(ctypes.c_longlong(ADVANCE_NS)))
            _answer(signal.SIGWINCH, library.count)
            sys.argv = ["draftgate", "serve", *json.loads(line)]
            main()


if __name__ == "__main__":
    run_nodes(ctypes.CDLL(sys.argv[1]))
