"""Moves of running streams between engines with the shipped model."""

from __future__ import annotations

from dataclasses import replace
from itertools import repeat
from random import Random

import pytest
from msgspec import structs

from draftgate.backends.engine.backend import EngineBackend
from draftgate.policies.moves import MoveEnd
from tests.gateway.harness import needs_engine
from tests.gateway.moving_streams import CONFIG, KINDS, job_of, move_streams, moved, quick_moves
from tests.gateway.troubles import dispatching, run_job

pytestmark = needs_engine

MOVES_OF_KIND = 42
"""Moves of each of the 12 kinds in the long test, 504 together."""


@pytest.fixture(autouse=True)
def _quick_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let moves end within few steps."""
    quick_moves(monkeypatch)


async def test_moved_streams_keep_their_text() -> None:
    """Texts, tokens, log probabilities and blocks of moved streams equal those of undisturbed
    runs."""
    ends = await move_streams(["several", "logprobs", "grammar", "draft_model"])
    assert ends[MoveEnd.MOVED]  # a stream may end before its move
    assert not ends[MoveEnd.REJECTED]
    assert not ends[MoveEnd.FAILED]


async def test_a_stream_moves_between_engines_in_their_own_processes() -> None:
    """A stream moves between engines in their own processes with the same text."""
    config = structs.replace(CONFIG, own_process=True)
    async with dispatching(EngineBackend, 2, config=config) as dispatched:
        for seed in range(20):  # a stream may end before its move on a busy machine
            job = job_of("logprobs", seed)
            choices, ends = await moved(dispatched, job, Random(seed))
            plain = await run_job(dispatched.dispatcher, replace(job, request_id=f"p{seed}"))
            assert choices == plain, seed
            if ends[MoveEnd.MOVED]:
                return
    pytest.fail("no stream moved")


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
async def test_500_random_moves_keep_every_text(kind: str) -> None:
    """Texts, log probabilities and blocks stay equal over 500 moves, 42 of each kind of stream."""
    ends = await move_streams(repeat(kind, MOVES_OF_KIND), 400, MOVES_OF_KIND)
    assert ends[MoveEnd.MOVED] >= MOVES_OF_KIND
    assert not ends[MoveEnd.REJECTED]
    assert not ends[MoveEnd.FAILED]
