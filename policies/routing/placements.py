"""What a routing policy remembers of where requests went."""

from __future__ import annotations

from dataclasses import dataclass, field

from draftgate.policies.routing.prefix_index import PrefixIndex
from draftgate.policies.routing.types import Candidate, RouteView


@dataclass(slots=True)
class Placements:
    """Where requests went.

    Attributes:
        last: id of the worker that got the last one; of equals the next one comes first.
        index: who has seen which prompts.
    """

    last: str = ""
    index: PrefixIndex = field(default_factory=PrefixIndex)

    def note(self, request: RouteView, worker: Candidate) -> None:
        """Note where a request goes."""
        self.last = worker.worker_id
        if request.block_hashes:
            self.index.note(worker.worker_id, request.block_hashes, worker.load.kv_blocks_total)
