"""Tests of streams of two real vLLM servers, one of which stops or dies meanwhile.

They need `vllm/` and `smollm2/` in the folder `REAL_MODELS`.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.fleet.failures import Stream, figures, run
from bench.harness.vllm import VllmServer, is_installed, vllm_servers

REAL = Path(os.environ.get("REAL_MODELS", ""))

pytestmark = pytest.mark.skipif(not is_installed(REAL), reason="needs vLLM in REAL_MODELS")


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[VllmServer]]:
    """Two servers of one model."""
    folder = tmp_path_factory.mktemp("vllm")
    with vllm_servers(REAL, [folder / "one.log", folder / "other.log"]) as found:
        yield found


@pytest.fixture(scope="module")
def undisturbed(
    servers: list[VllmServer], tmp_path_factory: pytest.TempPathFactory
) -> list[Stream]:
    """The streams of a run without a fault."""
    streams = run(servers, tmp_path_factory.mktemp("undisturbed"))
    assert all(one.is_whole for one in streams)
    return streams


# The killed server does not come back, so this fault is the last one.
@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL], ids=["stopped", "killed"])
def test_streams_survive_a_server(
    number: signal.Signals,
    servers: list[VllmServer],
    undisturbed: list[Stream],
    tmp_path: Path,
) -> None:
    """All greedy streams are whole, with the usage of the whole stream, although half of them lose
    their server. Those that continue with tokens have the text of an undisturbed run."""
    streams = run(servers, tmp_path, number)
    found = figures(streams, undisturbed)
    assert found["failed"] == 0, found
    assert found["continued"] > 0
    assert found["with_right_usage"] == len(streams)
    for one in streams:
        assert one.ids == one.dones == 1
        for resume in (one.metrics or {}).get("resumes", ()):
            assert (resume["from_worker_id"], resume["to_worker_id"]) == ("one", "other")
    continued, equal = (
        found[f"continued{suffix}_by_kind"]["ids"] for suffix in ("", "_with_equal_text")
    )
    assert equal == continued, found
