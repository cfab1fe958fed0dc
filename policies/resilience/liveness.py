"""When a silent worker or stream counts as lost.

A worker reports how many steps it has planned (`WorkerLoad.steps`). While a request waits for its
tokens, the worker owes steps; without any it hangs, whatever the cause. A single stream can also
be lost while its worker continues: it decodes, no request waits for capacity or memory, so it takes
part in every step, and yet no tokens arrive.

Silence is counted in checks that found no progress, each worth the time between two checks. A
gateway that was suspended itself, or whose event loop was blocked, therefore finds no worker hung.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from draftgate.policies.types import WorkerLoad

LATE_STEPS: Final = 20
"""A worker hangs if a step takes longer than this many usual ones. With accepted drafts a step is
worth several tokens, by which the reported speed counts, and a busy host stretches some steps
several times: twenty allow for both at once. (Chosen by that reasoning, 2026-11-22, not tuned on a
device.)"""

LEAST_PATIENCE_S: Final = 10.0
"""Shortest silence that counts, however fast the worker usually is. Compiling a kernel for a new
shape delays a step by seconds, swapping for longer; people and proxies give up on a silent stream
after 30. A worker that is declared hung too early costs a prefill elsewhere. (Chosen,
2026-11-22.)"""

RETRY_S: Final = 60.0
"""A hung worker without new steps is tried again after this time: it may be well, with its reports
lost. Every trial makes a request wait once more, so trials are rare. (Chosen, 2026-11-22.)"""


def patience_s(load: WorkerLoad) -> float:
    """Return the seconds without a step, or without tokens of a stream, that mean it is lost.

    By the longest steps that the worker makes: decodes, or steps full of a prompt.
    """
    step_s = max(load.speed.tpot_s, load.speed.prompt_token_s * load.step_tokens)
    return max(LEAST_PATIENCE_S, LATE_STEPS * step_s)


@dataclass(slots=True)
class WorkerSilence:
    """For how long a worker has made no step.

    Attributes:
        steps: number of planned steps at the last check.
        seconds: of silence, or since the worker was declared hung.
        hung: whether the worker counts as hung.
    """

    steps: int | None = None
    seconds: float = 0.0
    hung: bool = False

    def look(self, load: WorkerLoad, elapsed_s: float, *, owes: bool) -> bool:
        """Return whether the worker hangs; never if it does not report steps.

        Args:
            elapsed_s: what a check is worth.
            owes: whether a request waits for the worker's tokens.
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
    """For how long a running stream has produced nothing.

    Attributes:
        deltas: number of deltas at the last check.
        seconds: of silence.
    """

    deltas: int = 0
    seconds: float = 0.0

    def look(self, deltas: int, load: WorkerLoad, elapsed_s: float, *, runs: bool) -> bool:
        """Return whether the stream is lost.

        Args:
            deltas: number of deltas so far.
            elapsed_s: what a check is worth.
            runs: whether it decodes, and is not held back.
        """
        silent = runs and deltas == self.deltas and not load.waiting
        self.deltas = deltas
        self.seconds = self.seconds + elapsed_s if silent else 0.0
        return self.seconds > patience_s(load)
