"""The order in which engines that share a device run their steps.

Each engine that wants a step states its most urgent class, the slack of its tightest target, and
the predicted duration of the step. The next step goes to

1. an engine of the most urgent class that waits. Batch work (`BATCH_PRIORITY`) therefore runs only
   while no engine has interactive work;
2. among these, the engine with the least slack, if it would miss its target while the others run a
   step each;
3. otherwise the engine with the least device time per weight.

Device time is shared by start-time fair queueing (Goyal, Vin, Cheng: SIGCOMM 1996). Virtual time is
the device time that a weight of 1 has received. Each engine has a start tag, its position in it:

    start = max(virtual time, start)           while the engine waits
    virtual time = the smallest start of the waiting engines of the most urgent class
    start = start + seconds / weight           for a step of this many seconds

An engine gains no credit while it is idle, nor while others are more urgent. A target precedes the
order of the tags only among engines whose starts are within `LAG_S` of the smallest one. Otherwise
an engine whose target the device cannot meet would stop all others. While two engines both wait in
the most urgent class,

    |served_a / weight_a - served_b / weight_b|
        <= LAG_S + longest_a / weight_a + longest_b / weight_b,

where `longest` is the longest step. So an engine waits for each other engine of its class
for one step, and for up to LAG_S x weight more if that engine has targets. An engine of a more
urgent class waits only for the step in progress.

No class starves. An engine that has waited for `OUTRANKED_S` while others were more urgent runs a
step. They then wait for this step too, at most once in `OUTRANKED_S` for each such engine.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Final, Generic, TypeVar

from draftgate.policies.values import immutable

LAG_S: Final = 0.1
"""Maximum lead in seconds of device time per weight that a target gives an engine. Two to ten steps
of a usual model make up for a step that came late. (Chosen by that reasoning, not tuned,
2026-11-27.)"""

OUTRANKED_S: Final = 4.0
"""Wait in seconds after which an engine runs a step although others are more urgent. A worker
without a step, or a stream without a token, counts as lost after 10 s (`resilience.liveness`), and
two steps fit into that time. At steps of 50 ms, the others lose about 1% of the device. (Chosen by
that reasoning, not tuned, 2026-11-27.)"""

Engine = TypeVar("Engine", bound=Hashable)


@immutable
class StepUrgency:
    """The urgency of the next step of an engine.

    Attributes:
        priority: the most urgent class of its work, where lower values go first.
        slack_s: seconds for which the step may wait without missing a target, or None if no target
            depends on it. A target that is already missed does not count.
        step_s: predicted seconds of the step.
    """

    priority: int = 0
    slack_s: float | None = None
    step_s: float = 0.0


class TurnOrder(Generic[Engine]):
    """The order of the engines of one device, with their device time."""

    def __init__(self) -> None:
        self._virtual_s = 0.0
        self._starts_s: dict[Engine, float] = {}
        self._since_s: dict[Engine, float] = {}  # first choice at which a waiting engine waited

    def choose(self, waiting: Mapping[Engine, StepUrgency], now_s: float) -> Engine:
        """Return the engine that runs the next step.

        Args:
            waiting: the engines that want a step, at least one. The first one wins ties.
            now_s: present time in seconds, which never decreases.
        """
        self._since_s = {engine: self._since_s.get(engine, now_s) for engine in waiting}
        for engine in waiting:
            self._starts_s[engine] = max(self._starts_s.get(engine, 0.0), self._virtual_s)
        priority = min(each.priority for each in waiting.values())
        rivals = {engine: each for engine, each in waiting.items() if each.priority == priority}
        patient = [engine for engine in waiting if engine not in rivals]
        chosen = min(patient, key=self._since_s.__getitem__, default=None)
        if chosen is None or now_s - self._since_s[chosen] < OUTRANKED_S:
            chosen = self._next_of(rivals)
        del self._since_s[chosen]
        return chosen

    def charge(self, engine: Engine, seconds: float, weight: float = 1.0) -> None:
        """Add device time to an engine.

        Args:
            weight: share of the device that the engine gets in its class, more than 0.
        """
        start_s = self._starts_s.get(engine, self._virtual_s)
        self._starts_s[engine] = start_s + seconds / weight

    def forget(self, engine: Engine) -> None:
        """Drop an engine that will not return."""
        self._starts_s.pop(engine, None)
        self._since_s.pop(engine, None)

    def _next_of(self, rivals: Mapping[Engine, StepUrgency]) -> Engine:
        """Return the next engine of a class, and advance virtual time."""
        least = min(rivals, key=self._starts_s.__getitem__)
        self._virtual_s = self._starts_s[least]
        step_s = sum(each.step_s for each in rivals.values())
        pressing = {
            engine: each.slack_s
            for engine, each in rivals.items()
            if each.slack_s is not None
            and each.slack_s < step_s - each.step_s
            and self._starts_s[engine] <= self._virtual_s + LAG_S
        }
        return min(pressing, key=pressing.__getitem__) if pressing else least
