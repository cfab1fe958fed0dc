"""When a worker that says nothing is taken for lost.

A worker tells how many steps it has planned (`WorkerLoad.steps`). While somebody waits for its
tokens it owes steps: one that comes to none is hung, whatever holds it. A single stream may be
lost, too, while its worker goes on: it decodes, nobody waits for a seat or for memory, so it is in
each step, and yet nothing comes.

Silence is counted in looks at which nothing had moved, each worth the time between two of them: so
a process that was stopped itself, or an event loop that was held up, finds nobody hung.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from draftgate.policies.types import WorkerLoad

LATE_STEPS: Final = 20
"""A worker is hung that takes longer for a step than for so many usual ones. Drafts that are
accepted make a step worth several tokens, by which its speed is told, and a busy host stretches
some steps several times: twenty leaves room for both at once. (Chosen by that reasoning,
2026-11-22, not tuned on a device.)"""

LEAST_PATIENCE_S: Final = 10.0
"""However fast it usually is. A kernel that has to be compiled for a new shape holds a step up for
seconds, a machine that swaps for longer; people and proxies give up on a silent stream after 30.
One that is found hung too early costs a prefill elsewhere. (Chosen, 2026-11-22.)"""

RETRY_S: Final = 60.0
"""So long after it was found hung a worker is tried again that has come to no step since: it may be
well, and what it told of itself was lost. Who is sent there waits once more, so not often. (Chosen,
2026-11-22.)"""


def patience_s(load: WorkerLoad) -> float:
    """Return after how many seconds without a step, or without news of a stream, it is lost.

    By the longest steps that it makes: those of its decodes, and those full of a prompt.
    """
    step_s = max(load.speed.tpot_s, load.speed.prompt_token_s * load.step_tokens)
    return max(LEAST_PATIENCE_S, LATE_STEPS * step_s)


@dataclass(slots=True)
class WorkerSilence:
    """For how long a worker has come to no step.

    Attributes:
        steps: that it had planned at the last look.
        seconds: of silence, or since it was found hung.
        hung: whether it is taken for hung.
    """

    steps: int | None = None
    seconds: float = 0.0
    hung: bool = False

    def look(self, load: WorkerLoad, elapsed_s: float, *, owes: bool) -> bool:
        """Return whether the worker is hung; never where nobody counts steps.

        Args:
            elapsed_s: what a look is worth.
            owes: whether somebody waits for what it says.
        """
        moved, self.steps = load.steps is None or load.steps != self.steps, load.steps
        if moved or not (owes or self.hung):
            self.seconds, self.hung = 0.0, False
            return False
        self.seconds += elapsed_s
        if self.seconds > (RETRY_S if self.hung else patience_s(load)):
            self.seconds, self.hung = 0.0, not self.hung
        return self.hung


@dataclass(slots=True)
class StreamSilence:
    """For how long nothing has come of a stream that its worker runs.

    Attributes:
        deltas: that had come at the last look.
        seconds: of silence.
    """

    deltas: int = 0
    seconds: float = 0.0

    def look(self, deltas: int, load: WorkerLoad, elapsed_s: float, *, runs: bool) -> bool:
        """Return whether the stream is lost.

        Args:
            deltas: that have come.
            elapsed_s: what a look is worth.
            runs: whether it has begun to decode, and nobody holds it back.
        """
        silent = runs and deltas == self.deltas and not load.waiting
        self.deltas = deltas
        self.seconds = self.seconds + elapsed_s if silent else 0.0
        return self.seconds > patience_s(load)
