"""The seeded sequence of faults.

Each lane causes one fault after another, each on one node, with random pauses between them. The
lanes run at the same time. A fault ends when its node works again, so a lane never disturbs a
second node before the first one has recovered: a stream that loses three workers would fail by the
rules of the gateway (docs/design/failover.md). The sequence of each lane depends only on the seed,
the part and the lane. Its times also depend on how quickly the nodes recover.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    """A kind of fault."""

    KILL = "kill"
    """SIGKILL, and a start some seconds later."""
    PAUSE = "pause"
    """SIGSTOP and SIGCONT."""
    RESTART = "restart"
    """SIGTERM, an exit with status 0, and a start."""
    UPGRADE = "upgrade"
    """A restart that changes between two versions of Draftgate."""
    PARTITION = "partition"
    """All packets between a worker and the gateways are lost, and connections stay open."""
    RESET = "reset"
    """All connections between a worker and the gateways are reset."""
    MEMORY = "memory"
    """The process gets no more memory (RLIMIT_AS). If it fails, it starts again."""
    SLOW_LOG = "slow_log"
    """The reader of the log hangs, so that writes to stderr block."""
    FULL_DISK = "full_disk"
    """No file may grow (RLIMIT_FSIZE)."""
    SLOW_DISK = "slow_disk"
    """Each write to a file takes `SLOW_WRITE_S`."""
    CLOCK_STEP = "clock_step"
    """The clock of a node's machine goes forward or back, and stays there."""
    CERTIFICATE = "certificate"
    """The certificate of a gateway expires, and is renewed some seconds later."""
    NO_REDIS = "no_redis"
    """All packets between one node and Redis are lost, and its connections stay open."""
    REDIS_PAUSE = "redis_pause"
    REDIS_KILL = "redis_kill"
    """Redis is killed and starts empty."""
    REDIS_FAILOVER = "redis_failover"
    """Redis is killed, and its replica becomes the primary."""
    REDIS_FLUSH = "redis_flush"
    REDIS_EVICTION = "redis_eviction"
    """Redis has too little memory, and evicts keys (allkeys-lru)."""
    REDIS_CLOCK_STEP = "redis_clock_step"
    """The clocks of both servers go forward or back, and stay there."""


@dataclass(frozen=True)
class Lane:
    """A lane of faults.

    Attributes:
        targets: names of groups of nodes, or `redis`.
        kinds: weights of the kinds of faults.
        pause_s: mean pause between two faults.
    """

    targets: tuple[str, ...]
    kinds: dict[Kind, float]
    pause_s: float


WORKER_KINDS = {
    Kind.KILL: 3.0,
    Kind.PAUSE: 2.0,
    Kind.RESTART: 2.0,
    Kind.UPGRADE: 1.0,
    Kind.PARTITION: 2.0,
    Kind.RESET: 2.0,
    Kind.MEMORY: 1.0,
    Kind.SLOW_LOG: 1.0,
}

LANES = {
    "engine": Lane(("engine",), WORKER_KINDS, 20.0),
    "simulated": Lane(("simulated",), WORKER_KINDS, 10.0),
    "gateway": Lane(
        ("gateway",),
        {
            Kind.KILL: 2,
            Kind.PAUSE: 2,
            Kind.RESTART: 2,
            Kind.UPGRADE: 1,
            Kind.SLOW_LOG: 1,
            Kind.CERTIFICATE: 2,
        },
        12.0,
    ),
    "upstream": Lane(("upstream",), {Kind.KILL: 1, Kind.PAUSE: 2, Kind.RESTART: 2}, 30.0),
    "redis": Lane(
        ("redis",),
        {
            Kind.REDIS_PAUSE: 1,
            Kind.REDIS_KILL: 1,
            Kind.REDIS_FAILOVER: 2,
            Kind.REDIS_FLUSH: 1,
            Kind.REDIS_EVICTION: 1,
            Kind.REDIS_CLOCK_STEP: 1,
        },
        20.0,
    ),
    "surroundings": Lane(
        ("gateway", "engine", "simulated"),
        {Kind.FULL_DISK: 1, Kind.SLOW_DISK: 2, Kind.CLOCK_STEP: 2, Kind.NO_REDIS: 2},
        10.0,
    ),
}

HOLD_S = (1.0, 9.0)
"""Shortest and longest duration of a fault. A peer counts as lost after 3 s of silence."""


CLOCKS_S = (-3600, -20, 0, 20, 3600)
"""How far a clock is ahead after a step, in seconds."""

REDIS_STEPS_S = (-20, 20, 3600)
"""Steps of the clock of Redis, in seconds. Leases of killed gateways stay for the time of a step
back, so that is short."""

SLOW_WRITE_S = 2.0


@dataclass(frozen=True)
class Fault:
    """A fault that a lane causes.

    Attributes:
        after_s: pause since the end of the lane's last fault.
        group: name of the group of nodes, or `redis`.
        place: a number from 0 to 1 that selects a node of the group.
        hold_s: duration of the fault.
        clock_s: time by which a clock is ahead afterwards, or the step of the clock of Redis.
    """

    after_s: float
    kind: Kind
    group: str
    place: float
    hold_s: float
    clock_s: int


def faults_of(lane_name: str, seed: int, part: int) -> Iterator[Fault]:
    """Yield the faults of a lane, without end."""
    lane, rng = LANES[lane_name], random.Random(f"faults/{seed}/{part}/{lane_name}")
    while True:
        (kind,) = rng.choices(list(lane.kinds), list(lane.kinds.values()))
        after_s = rng.uniform(0.5, 1.5) * lane.pause_s
        clock_s = rng.choice(REDIS_STEPS_S if lane_name == "redis" else CLOCKS_S)
        group, place, hold_s = rng.choice(lane.targets), rng.random(), rng.uniform(*HOLD_S)
        yield Fault(after_s, kind, group, place, hold_s, clock_s)
