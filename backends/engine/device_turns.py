"""The turns of the engines that share a device in one process.

Each engine runs its steps in its own thread. Without turns, the steps of two engines would run at
the same time, and each would delay the other, whatever their urgency. `policies.turns` decides who
is next, and this module makes the threads wait for it.

The lock is held for a few assignments and a choice among the waiting engines, never during a step.
An engine that is alone on its device only acquires the lock twice per step, without contention.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from draftgate.policies.turns import StepUrgency, TurnOrder

_ANY_STEP: Final = StepUrgency()
"""The urgency of a step that no other engine waits for, so that it does not matter."""


class DeviceTurns:
    """The engines of a device. Any thread may call the methods."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Start without engines.

        Args:
            clock: time in seconds.
        """
        self._clock = clock
        self._lock = threading.Lock()
        self._order = TurnOrder[EngineTurns]()
        self._engines: set[EngineTurns] = set()
        self._waiting: dict[EngineTurns, StepUrgency] = {}
        self._holder: EngineTurns | None = None
        self._since_s = 0.0  # time from which the holder is charged

    @property
    def holder(self) -> EngineTurns | None:
        """The engine that has the turn, or None."""
        return self._holder

    @property
    def awaited(self) -> bool:
        """Whether an engine waits for its turn."""
        return bool(self._waiting)

    def join(
        self, urgency: Callable[[], StepUrgency | None], wake: Callable[[], None]
    ) -> EngineTurns:
        """Return the turns of another engine, which must `leave` in the end.

        Args:
            urgency: returns the urgency of the engine's next step, or None without work. It is
                called in the thread that calls `take` or `end_step`.
            wake: called when the engine gets its turn while it waits. Any thread may call it, and
                it must return immediately.
        """
        engine = EngineTurns(self, urgency, wake)
        with self._lock:
            self._engines.add(engine)
            if len(self._engines) == 2:
                self._since_s = self._clock()  # an engine that is alone is not charged
        return engine

    def take(self, engine: EngineTurns) -> bool:
        """Return whether an engine has the turn. Otherwise it waits from now on if it has work."""
        with self._lock:
            if self._holder is engine:
                return True
            if self._holder is None and not self._waiting and engine in self._engines:
                self._begin_step(engine)
                return True
        urgency = engine.urgency()
        with self._lock:
            self._wait(engine, urgency)
            return self._holder is engine

    def end_step(self, engine: EngineTurns, *, launched: bool) -> bool:
        """Charge an engine for its step, and return whether it keeps the turn.

        Args:
            launched: whether its next step runs already. The engine then keeps the turn.
        """
        with self._lock:
            if self._holder is not engine:
                return False  # it has left
            if len(self._engines) > 1:
                self._order.charge(engine, self._clock() - self._since_s)
            if not self._waiting:
                self._begin_step(engine)
                return True
            if launched:
                self._since_s = self._clock()
                return True
        urgency = engine.urgency()
        with self._lock:
            if self._holder is engine:
                self._holder = None
                self._wait(engine, urgency)
            return self._holder is engine

    def give_back(self, engine: EngineTurns) -> None:
        """End the turn of an engine without work."""
        with self._lock:
            if self._holder is engine:
                self._holder = None
                self._pass_on()

    def leave(self, engine: EngineTurns) -> None:
        """Remove an engine, which then gets no turn. Further calls have no effect."""
        with self._lock:
            self._engines.discard(engine)
            self._order.forget(engine)
            if self._holder is engine:
                self._holder = None
            self._wait(engine, None)

    def _begin_step(self, engine: EngineTurns) -> None:
        """Give the turn to an engine while no other one waits."""
        self._holder = engine
        if len(self._engines) > 1:
            self._since_s = self._clock()
            self._order.choose({engine: _ANY_STEP}, self._since_s)

    def _wait(self, engine: EngineTurns, urgency: StepUrgency | None) -> None:
        """Let an engine wait with this urgency, or no longer with None."""
        if urgency is None or engine not in self._engines:
            self._waiting.pop(engine, None)
        else:
            self._waiting[engine] = urgency
        self._pass_on()

    def _pass_on(self) -> None:
        """Give the turn to the next waiting engine, if no engine has it."""
        if self._holder is None and self._waiting:
            self._since_s = self._clock()
            self._holder = self._order.choose(self._waiting, self._since_s)
            del self._waiting[self._holder]
            self._holder.wake()


@dataclass(frozen=True, slots=True, eq=False)
class EngineTurns:
    """The turns of one engine. Implements `core.pipeline.Turns`.

    Only the engine's thread may call the methods, except for `leave`.

    Attributes:
        urgency, wake: as in `DeviceTurns.join`.
    """

    _device: DeviceTurns
    urgency: Callable[[], StepUrgency | None]
    wake: Callable[[], None]

    @property
    def held(self) -> bool:
        """Whether the engine has the turn."""
        return self._device.holder is self

    @property
    def awaited(self) -> bool:
        """Whether another engine waits for the device. Read it only while the turn is held."""
        return self._device.awaited

    def take(self) -> bool:
        """See `Turns` and `DeviceTurns.join`."""
        return self._device.take(self)

    def end_step(self, *, launched: bool = False) -> bool:
        """See `Turns`."""
        return self._device.end_step(self, launched=launched)

    def give_back(self) -> None:
        """See `Turns`."""
        self._device.give_back(self)

    def leave(self) -> None:
        """Take no more turns, and end the present one. Further calls have no effect."""
        self._device.leave(self)


_shared: Final[dict[str, DeviceTurns]] = {}


def shared_turns(device: str) -> DeviceTurns:
    """Return the turns of a device, which all engines of this process share.

    Args:
        device: name of the device.
    """
    return _shared.setdefault(device, DeviceTurns())
