"""`off`: let every stream stay on its worker while the worker runs."""

from __future__ import annotations

from collections.abc import Sequence

from draftgate.policies.rescheduling.types import ChosenMove, PoolState, StreamsOf


class Off:
    """Moves no stream. Streams still move from a worker that is leaving (`policies.moves`)."""

    name = "off"
    reschedules = False

    def choose(self, pool: PoolState, streams_of: StreamsOf) -> Sequence[ChosenMove]:
        return ()
