"""Tests of the fuzz targets on the committed inputs, among them every input that once failed."""

from __future__ import annotations

import time
import tracemalloc
from pathlib import Path

import pytest

from tests.fuzz.target import CORPUS
from tests.fuzz.targets import TARGETS

INPUTS = sorted(path for path in CORPUS.glob("*/*"))

MOST_BYTES = 64 << 20
"""Memory for an input of at most 64 KiB. The largest of the corpus takes a twentieth."""

LONGEST_S = 10.0
"""CPU time for an input. The slowest of the corpus takes a hundredth."""


def _id(path: Path) -> str:
    return path.relative_to(CORPUS).as_posix()


@pytest.mark.parametrize("path", INPUTS, ids=_id)
def test_parser_raises_only_its_documented_errors(path: Path) -> None:
    """A parser accepts an input or raises a documented error, in bounded time and memory."""
    target, data = TARGETS[path.parent.name], path.read_bytes()
    begun_s = time.thread_time()
    tracemalloc.start()
    try:
        target.run(data)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak <= MOST_BYTES
    assert time.thread_time() - begun_s <= LONGEST_S


def test_every_target_has_inputs() -> None:
    """Each parser has committed inputs, and each folder of inputs has a parser."""
    assert {path.parent.name for path in INPUTS} == TARGETS.keys()
