"""Handovers of streams from the worker of their prompt to the worker of their output.

A handover is a move that begins before the first token. The destination is reserved when the prompt
is sent, in the store too. It copies the blocks of each chunk while the source computes later
chunks. After the first token, it copies the last blocks, verifies the tokens of the source in its
first step, and continues. The source decodes until then. If anything fails, it decodes the rest.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

from draftgate.backends.kv_transfer.transfer import TransferEnd
from draftgate.backends.types import GenerationRequest
from draftgate.gateway.dispatch.hold import Hold
from draftgate.gateway.dispatch.kv_fetch import KvFetcher, block_chains
from draftgate.gateway.dispatch.kv_pulls import can_supply
from draftgate.gateway.dispatch.migration import Migration
from draftgate.gateway.dispatch.overlap import Overlap, computes_same_tokens
from draftgate.gateway.dispatch.prompt import Prompt
from draftgate.gateway.dispatch.routing import Routed
from draftgate.gateway.fleet import FleetWorker
from draftgate.gateway.offload import offload
from draftgate.policies.moves import MOVE_S, MoveEnd, MoveReason
from draftgate.policies.rescheduling.types import ChosenMove
from draftgate.policies.types import WorkerLoad

LEAST_BLOCKS: Final = 16
"""Blocks that are copied together while the source computes further chunks. Smaller copies would
mostly wait for the turns of the workers. (Chosen, not tuned, 2026-11-24.)"""

LEAST_PAUSE_S: Final = 0.005
MOST_PAUSE_S: Final = 0.25
"""Bounds of the time between two searches for computed blocks, which is that of a full step.
(Chosen, not tuned, 2026-11-24.)"""

_FAILURES: Final = {
    TransferEnd.FULL: MoveEnd.NO_ROOM,
    TransferEnd.FAILED: MoveEnd.FAILED,
    TransferEnd.DAMAGED: MoveEnd.FAILED,
}


def chosen_handover(stream: Prompt) -> ChosenMove:
    """Return the handover of a stream whose output another worker computes."""
    decided, decode = stream.hold.routed.phases, stream.hold.routed.decode
    assert decided is not None
    assert decode is not None
    return ChosenMove(
        stream.run.requests[stream.index].request_id,
        stream.worker.worker_id,
        decode.worker.worker_id,
        MoveReason.PHASES,
        decided.gain_s,
        decided.threshold_s,
        decided.reason,
        decided.policy,
    )


def take_reserved(stream: Prompt) -> tuple[GenerationRequest, Routed | None]:
    """Return the rest of a stream with the id of its reservation, and the reserved worker.

    The worker is None if it cannot take the blocks of the stream's worker, because the reservation
    of the prompt has chosen another one.
    """
    request_id, routed = stream.hold.take_decode()
    request = stream.output.rest(request_id)
    if routed is None or can_supply(stream.worker, routed.worker):
        return request, routed
    routed.worker.release(request_id)
    return request, None


async def hand_over(kv: KvFetcher, stream: Prompt, successor: Hold, move: Migration) -> MoveEnd:
    """Copy the blocks of a prompt, and hand the stream over after its first token.

    Raises:
        TimeoutError: the destination takes longer than `MOVE_S` after the first token.
        BackendFailed: a worker failed.
    """
    with Overlap(stream, successor, move) as overlap:
        copies = _Copies(kv, stream, successor.worker, move)
        chains = await copies.chains()
        while not stream.hold.decodes:
            end = await copies.copy(chains, LEAST_BLOCKS)
            if end is not MoveEnd.MOVED:
                return end
            await overlap.source_tokens(1, most_s=_pause_s(stream.worker.backend.load()))
        async with asyncio.timeout(MOVE_S):
            end = await copies.copy(chains, 1)
            if end is not MoveEnd.MOVED or stream.output.is_complete:
                return MoveEnd.ENDED if stream.output.is_complete else end
            if computes_same_tokens(stream, successor) and not stream.is_read_slowly:
                return await overlap.switch(1)
    move.hand_over(successor)
    return MoveEnd.MOVED


class _Copies:
    """The copies of a prompt's blocks to the destination of a handover."""

    def __init__(self, kv: KvFetcher, stream: Prompt, sink: FleetWorker, move: Migration) -> None:
        self._kv = kv
        self._stream = stream
        self._sink = sink
        self._move = move
        self._request = stream.output.rest("")
        self._known: dict[bytes, int] = {}  # leading blocks that the destination holds, by chain

    async def chains(self) -> Sequence[Sequence[bytes]]:
        """Return the different hash chains of the choices."""
        form = self._sink.kv_format
        assert form is not None
        found = await offload(block_chains, self._request, form.block_tokens)
        return [chain for chain in dict.fromkeys(map(tuple, found)) if chain]

    async def copy(self, chains: Sequence[Sequence[bytes]], least: int) -> MoveEnd:
        """Copy the blocks that the source has computed, and return `MoveEnd.MOVED` on success.

        Args:
            least: least number of new blocks of a chain.
        """
        source, sink, run = self._stream.worker, self._sink, self._stream.run
        for hashes in chains:
            known = self._known.get(hashes[-1], 0)
            held = await source.kv.held_blocks(hashes)
            if held - known < least:
                continue
            fetch = await self._kv.copy_prefix(run, hashes[:held], source, sink)
            self._move.add_stage([fetch])
            self._known[hashes[-1]] = fetch.known_blocks + fetch.blocks
            if fetch.end in _FAILURES:
                return _FAILURES[fetch.end]
        return MoveEnd.MOVED


def _pause_s(load: WorkerLoad) -> float:
    """Return the time of a step that is full of prompt tokens, within bounds."""
    step_s = load.speed.step_s + load.step_tokens * load.speed.step_token_s
    return min(max(step_s, LEAST_PAUSE_S), MOST_PAUSE_S)
