"""Decides which adapters are in memory, and which requests wait for theirs.

Each adapter in memory has a slot, from 1 on. A request whose adapter is not in memory waits until
the adapter is loaded, into a free slot or in place of the least recently requested adapter without
an open request. If every slot has open requests, the requests after the first one that needs a slot
wait too, so that requests for adapters in memory cannot keep it waiting forever. Requests without
an adapter never wait.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import NamedTuple

from draftgate.backends.types import GenerationRequest

Submit = Callable[[GenerationRequest, float, int], None]
"""Passes a request to the worker, with the time of its arrival and the slot of its adapter."""


class _Arrival(NamedTuple):
    request: GenerationRequest
    arrived_s: float


class AdapterSlots:
    """The slots of a worker. It handles only names of adapters, and no tensors."""

    def __init__(self, num_slots: int, is_open: Callable[[str], bool]) -> None:
        """Start with empty slots.

        Args:
            num_slots: number of slots, at least 1.
            is_open: returns whether the worker still runs a request, by its id.
        """
        self._free = list(range(num_slots, 0, -1))
        self._is_open = is_open
        self._slots: OrderedDict[str, int] = OrderedDict()  # least recently requested first
        self._users: dict[str, set[str]] = {}  # ids of requests, some of which may have ended
        self._loading: dict[str, int] = {}
        self._waiting: list[_Arrival] = []

    @property
    def waiting_sequences(self) -> int:
        """Number of sequences that wait for their adapters."""
        return sum(len(one.request.choices) for one in self._waiting)

    @property
    def is_loading(self) -> bool:
        """Whether an adapter that `admit` returned is neither in memory nor has failed."""
        return bool(self._loading)

    def add(self, request: GenerationRequest, arrived_s: float) -> None:
        """Let a request wait. `admit` returns it when its adapter is in memory."""
        self._waiting.append(_Arrival(request, arrived_s))

    def cancel(self, request_id: str) -> None:
        """Forget a request, if it waits."""
        self._waiting = [one for one in self._waiting if one.request.request_id != request_id]

    def admit(self, submit: Submit) -> list[tuple[str, int]]:
        """Submit the requests whose adapters are in memory, in order of arrival.

        Returns:
            Adapters to load, with their slots.
        """
        arrivals, self._waiting = self._waiting, []
        loads: list[tuple[str, int]] = []
        blocked = False
        for arrival in arrivals:
            adapter = arrival.request.adapter
            if not blocked and adapter in self._slots:
                submit(*arrival, self._use(arrival.request))
                continue
            self._waiting.append(arrival)
            if blocked or adapter in self._loading:
                continue
            slot = self._take_slot()
            if slot is None:
                blocked = True
            else:
                self._loading[adapter] = slot
                loads.append((adapter, slot))
        return loads

    def loaded(self, adapter: str) -> None:
        """Record that an adapter that `admit` returned is in its slot."""
        self._slots[adapter] = self._loading.pop(adapter)

    def failed(self, adapter: str) -> list[GenerationRequest]:
        """Free the slot of an adapter that cannot be loaded, and return its requests."""
        self._free.append(self._loading.pop(adapter))
        failed = [one.request for one in self._waiting if one.request.adapter == adapter]
        self._waiting = [one for one in self._waiting if one.request.adapter != adapter]
        return failed

    def _use(self, request: GenerationRequest) -> int:
        adapter = request.adapter
        self._slots.move_to_end(adapter)
        self._users[adapter] = {*self._open_users(adapter), request.request_id}
        return self._slots[adapter]

    def _take_slot(self) -> int | None:
        """Return an empty slot, after evicting an idle adapter if necessary, or None."""
        if self._free:
            return self._free.pop()
        for adapter in self._slots:
            if not any(self._open_users(adapter)):
                self._users.pop(adapter, None)
                return self._slots.pop(adapter)
        return None

    def _open_users(self, adapter: str) -> Iterator[str]:
        return filter(self._is_open, self._users.get(adapter, ()))
