"""Detection of hung workers and lost streams.

A worker reports how many steps it has planned (`WorkerLoad.steps`). While a request waits for
tokens, the worker must plan steps. If it plans none, it hangs, whatever the cause. A single stream
can also be lost while its worker continues. Such a stream decodes, and no request waits for
capacity or memory. So it takes part in every step, but no tokens arrive.

Silence is counted in checks without progress. Each check is worth the time between two checks. So a
gateway that was suspended, or whose event loop was blocked, reports no worker as hung.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from draftgate.policies.types import WorkerLoad

LATE_STEPS: Final = 20
"""Duration of a step, in usual steps, after which a worker hangs. With accepted drafts a step
yields several tokens, and the reported speed counts tokens. A busy host also stretches some
steps several times. Twenty allow for both. (Chosen by that reasoning, 2026-11-22, not tuned on a
device.)"""

LEAST_PATIENCE_S: Final = 10.0
"""Shortest silence that counts, in seconds, even for fast workers. A compilation for a new shape
delays a step by seconds, and swapping by more. People and proxies give up on a silent stream
after 30. A worker that is declared hung too early costs a prefill elsewhere. (Chosen,
2026-11-22.)"""

UPSTREAM_PATIENCE_S: Final = 20.0
"""Default silence of an upstream after the first byte of a stream that counts as a loss, in
seconds. An engine that computes long prompts of others, or evicts the sequence, pauses a stream for
seconds. People and proxies give up after 30. (Chosen by that reasoning, 2026-11-29.)"""

UNREACHABLE_PATIENCE_S: Final = 5.0
"""Silence of a stream that counts as a loss, in seconds, while the probes of its upstream fail. A
server that shuts down may refuse new connections and keep its streams open without another token
(vLLM 0.32 after SIGTERM). A stall beside a failed probe is hardly a long prompt, but one probe may
also come too late at a busy server. (Chosen by that reasoning, 2026-11-30.)"""

RETRY_S: Final = 60.0
"""Seconds after which a hung worker without new steps gets another trial, because only its reports
may be lost. Each trial makes a request wait again, so trials are rare. (Chosen, 2026-11-22.)"""


def patience_s(load: WorkerLoad) -> float:
    """Return the seconds without a step, or without tokens of a stream, that count as a loss.

    The result follows from the worker's longest steps: decodes, or steps full of prompt tokens.
    """
    step_s = max(load.speed.tpot_s, load.speed.prompt_token_s * load.step_tokens)
    return max(LEAST_PATIENCE_S, LATE_STEPS * step_s)


@dataclass(slots=True)
class WorkerSilence:
    """The time during which a worker has planned no step.

    Attributes:
        steps: number of planned steps at the last check.
        seconds: seconds of silence, or seconds since the worker was declared hung.
        hung: whether the worker counts as hung.
    """

    steps: int | None = None
    seconds: float = 0.0
    hung: bool = False

    def check(self, load: WorkerLoad, elapsed_s: float, *, owes: bool) -> bool:
        """Return whether the worker hangs, or False if it does not report steps.

        Args:
            elapsed_s: seconds that the check is worth.
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
    """The time during which a running stream has produced no output.

    Attributes:
        deltas: number of deltas at the last check.
        seconds: seconds of silence.
    """

    deltas: int = 0
    seconds: float = 0.0

    def check(
        self,
        deltas: int,
        load: WorkerLoad,
        elapsed_s: float,
        *,
        runs: bool,
        most_s: float | None = None,
    ) -> bool:
        """Return whether the stream is lost.

        Args:
            deltas: number of deltas so far.
            elapsed_s: seconds that the check is worth.
            runs: whether the stream decodes at full pace.
            most_s: silence that counts as a loss in seconds, or None to derive it from the load.
        """
        waits = most_s is None and load.waiting
        silent = runs and deltas == self.deltas and not waits
        self.deltas = deltas
        self.seconds = self.seconds + elapsed_s if silent else 0.0
        return self.seconds > (patience_s(load) if most_s is None else most_s)
