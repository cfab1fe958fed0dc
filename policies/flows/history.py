"""The history of each tenant's flows: which hops follow a hop, and how long they are.

The history learns from flows that have ended. A *state* is a tenant, the position of a hop in its
flow and the kind of the hop. It has decaying means of the lengths of its hops, and decaying counts
of the kinds that followed. Positions keep the states free of cycles, so one pass over the positions
gives the expected later hops.

Hops may overlap, such as parallel retrievals. A hop that arrives while an earlier hop of its flow
runs is expected to end with it. It therefore adds no time to the flow.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from draftgate.policies.flows.types import HopForecast, HopKind, HopRecord

MOST_STATES: Final = 4096
"""Maximum number of states, about 4 MB. The least recently used state is forgotten first."""

MOST_KINDS: Final = 8
"""Maximum number of kinds that may follow a state. The rarest kind is forgotten first."""

MOST_HOPS: Final = 32
"""Positions that are distinguished. Later hops of longer flows are not predicted."""

_FORGETTING: Final = 0.95
"""Decay per hop of a state, which averages about the last twenty. (Chosen, not tuned: the hops of
an application change with its releases, and twenty flows take seconds.)"""

OVERLAP_S: Final = 0.02
"""Seconds by which a hop must arrive before the end of an earlier hop to overlap it. A client may
send its next request as soon as it has read the last byte of a stream, before the store knows the
end. The limit is the deadline of a call of the store (`gateway.state.guarded.calls`)."""

LEAST_CHANCE: Final = 0.02
"""Probability below which a further hop is ignored. It ends the prediction of long chains early."""


@dataclass(slots=True)
class _Mean:
    """A decaying mean."""

    total: float = 0.0
    weight: float = 0.0

    def add(self, value: float) -> None:
        """Add a value, which decays all earlier values."""
        self.total = self.total * _FORGETTING + value
        self.weight = self.weight * _FORGETTING + 1.0

    @property
    def value(self) -> float:
        """The mean, or 0 without any value."""
        return self.total / self.weight if self.weight else 0.0


@dataclass(slots=True)
class _State:
    """The hops of one tenant, position and kind.

    Attributes:
        overlap: mean of 1 for each hop that arrived while an earlier hop ran, and of 0 otherwise.
        following: decaying count of each following kind, where None is the end of the flow.
    """

    prompt_tokens: _Mean = field(default_factory=_Mean)
    output_tokens: _Mean = field(default_factory=_Mean)
    service_s: _Mean = field(default_factory=_Mean)
    gap_s: _Mean = field(default_factory=_Mean)
    overlap: _Mean = field(default_factory=_Mean)
    following: dict[HopKind | None, float] = field(default_factory=dict)

    def add_following(self, kind: HopKind | None) -> None:
        """Count what followed a hop."""
        for known in self.following:
            self.following[known] *= _FORGETTING
        self.following[kind] = self.following.get(kind, 0.0) + 1.0
        if len(self.following) > MOST_KINDS:
            others = [known for known in self.following if known != kind]
            del self.following[min(others, key=self.following.__getitem__)]

    def forecast(self, chance: float, *, elsewhere: bool = False) -> HopForecast:
        """Return the expected hop, which follows with a probability."""
        return HopForecast(
            chance * (1.0 - self.overlap.value),
            self.prompt_tokens.value,
            self.output_tokens.value,
            self.service_s.value,
            self.gap_s.value,
            elsewhere,
        )


_Key = tuple[str, int, HopKind]
"""The key of a state: a tenant, a position from 1, and a kind."""


class FlowHistory:
    """The history of all tenants, where only a tenant's own flows predict its flows."""

    def __init__(self, most_states: int = MOST_STATES) -> None:
        self._most = most_states
        self._states = OrderedDict[_Key, _State]()  # the most recently used state is last

    def __len__(self) -> int:
        """Return the number of states."""
        return len(self._states)

    def add_flow(self, tenant: str, hops: Sequence[HopRecord]) -> None:
        """Learn from the hops of a flow that has ended, in the order of their arrival."""
        until_s = 0.0  # latest end of the earlier hops
        known = hops[:MOST_HOPS]
        for index, hop in enumerate(known):
            state = self._state((tenant, index + 1, hop.kind))
            state.overlap.add(1.0 if index and hop.begun_s + OVERLAP_S < until_s else 0.0)
            state.gap_s.add(max(hop.begun_s - until_s, 0.0) if index else 0.0)
            if hop.ended_s is not None:
                state.prompt_tokens.add(hop.prompt_tokens)
                state.output_tokens.add(hop.output_tokens)
                state.service_s.add(hop.service_s)
                until_s = max(until_s, hop.ended_s)
            if index + 1 < len(hops):
                state.add_following(hops[index + 1].kind)
            else:
                state.add_following(None)

    def own(self, tenant: str, position: int, kind: HopKind) -> HopForecast | None:
        """Return the expected lengths of a hop that has arrived, or None if unknown.

        Args:
            position: number of the hop in its flow, from 1.
        """
        state = self._states.get((tenant, position, kind))
        return None if state is None or not state.output_tokens.weight else state.forecast(1.0)

    def later(self, tenant: str, position: int, kind: HopKind) -> tuple[HopForecast, ...]:
        """Return the expected hops after a hop that has arrived, in the order of their positions.

        Args:
            position: number of the hop in its flow, from 1.
        """
        found: list[HopForecast] = []
        chances: dict[HopKind, float] = {kind: 1.0}
        while chances and position < MOST_HOPS:
            following: defaultdict[HopKind, float] = defaultdict(float)
            for before, chance in chances.items():
                state = self._states.get((tenant, position, before))
                if state is None:
                    continue
                self._states.move_to_end((tenant, position, before))
                total = sum(state.following.values())
                for after, count in state.following.items():
                    if after is not None:
                        following[after] += chance * count / total
            position += 1
            chances = {}
            for after, chance in following.items():
                state = self._states.get((tenant, position, after))
                if chance >= LEAST_CHANCE and state is not None:
                    chances[after] = chance
                    found.append(state.forecast(chance, elsewhere=after.model != kind.model))
        return tuple(found)

    def _state(self, key: _Key) -> _State:
        """Return the state of a key, which is the most recently used one from now on."""
        state = self._states.setdefault(key, _State())
        self._states.move_to_end(key)
        if len(self._states) > self._most:
            self._states.popitem(last=False)
        return state
