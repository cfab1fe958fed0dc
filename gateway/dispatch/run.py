"""An admitted job, and the events of its prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Any, TypeAlias

from draftgate.backends.types import Delta, GenerationRequest, SpeculationOutcome
from draftgate.gateway.dispatch.admission import Entry
from draftgate.gateway.dispatch.decisions import Decision
from draftgate.gateway.dispatch.flows import Hop
from draftgate.gateway.dispatch.job import Job
from draftgate.gateway.dispatch.kv_pulls import KvFetch
from draftgate.gateway.tracing import Span
from draftgate.policies.moves import MoveEnd, MoveReason
from draftgate.policies.rescheduling.types import ChosenMove
from draftgate.policies.resilience.failover import Cause, GivenUp
from draftgate.policies.types import Pace
from draftgate.policies.values import immutable


@immutable
class Resume:
    """The continuation of a prompt on another worker.

    Attributes:
        index: index of the prompt.
        source, sink: ids of the workers.
        cause: the cause of the loss of the source.
        reason: the error message.
        kept_tokens: output tokens that the prompt continues from, in all open choices.
        same_numerics_class: whether the text is guaranteed to equal that of an undisturbed run.
    """

    index: int
    source: str
    sink: str
    cause: Cause
    reason: str
    kept_tokens: int
    same_numerics_class: bool

    def shown(self) -> dict[str, Any]:
        """Return the continuation as the `metrics` of a response show it."""
        return {
            "prompt": self.index,
            "from_worker_id": self.source,
            "to_worker_id": self.sink,
            "kept_tokens": self.kept_tokens,
            "same_numerics_class": self.same_numerics_class,
        }


@immutable
class Move:
    """The end of an attempt to move a running prompt to another worker.

    Attributes:
        index: index of the prompt.
        source, sink: ids of the workers. The destination is empty if none had room.
        stages: number of copies while the prompt ran on the source.
        blocks, num_bytes: what the destination stored in these stages.
        verified_tokens: number of tokens that both workers computed, in an exact numerics class.
        gap_s: time from the last token of the source to the first new token in seconds, or None if
            the prompt did not move.
        chosen: the choice of the rescheduling policy with its figures, or None if the source is
            leaving.
    """

    index: int
    reason: MoveReason
    end: MoveEnd
    source: str
    sink: str
    stages: int
    blocks: int
    num_bytes: int
    verified_tokens: int
    gap_s: float | None
    chosen: ChosenMove | None = None


@immutable
class NotResumed:
    """A prompt has lost its worker, or its turn, and cannot continue."""

    cause: Cause
    why: GivenUp


@immutable
class Preempted:
    """A request has lost its place at an upstream to a request of a higher class.

    Attributes:
        source: id of the upstream.
        continues: whether the client has a part of the response, which continues later.
    """

    source: str
    continues: bool


@immutable
class Fallback:
    """Another model than the requested one gets a request.

    Attributes:
        requested, model: the model that cannot respond, and the one that gets the request.
        reason: a `upstreams.fallbacks.FallbackReason`.
    """

    requested: str
    model: str
    reason: str


class PrefillEnd(StrEnum):
    """What became of the prompt of a request for upstreams with roles."""

    COMPUTED = "computed"
    """The upstream has computed it for another one, which gets the request."""
    FAILED = "failed"
    """The upstream has not computed it."""
    DIRECT = "direct"
    """The upstream of the output computes it, by the decision about the request."""


@immutable
class Prefill:
    """The call of an upstream for the prompt of a request, or the decision to omit it.

    Attributes:
        worker_id: id of the upstream, or empty for `PrefillEnd.DIRECT`.
        seconds: the duration of the call.
    """

    worker_id: str
    end: PrefillEnd
    seconds: float = 0.0


Event: TypeAlias = (
    Decision
    | Resume
    | NotResumed
    | KvFetch
    | Move
    | Fallback
    | Prefill
    | Preempted
    | SpeculationOutcome
)
"""What happens to a prompt: it gets its first worker, with a decision about speculation, continues
on another one or cannot, may fetch the KV blocks of its prefix, ends an attempt to move, gets
another model, is computed by another upstream than its output, loses its place at one, or has
drafts that an upstream reports."""

Watch: TypeAlias = Callable[[Event], None]
"""A function that takes the events of a job, and returns at once."""


def ignore(_: object) -> None:
    """Ignore a delta or an event."""


class Run(Entry):
    """A job and its entry at admission, as its prompts see them.

    Attributes:
        requests: a sized request for each prompt.
        watch: takes its events.
        resumes: the resumes of its prompts, in order.
        pace: the pace that its workers must keep.
        tpot_s: seconds in which its client can take one token of each choice, or 0 if unknown.
        hop: the place of the job in its flow, or None.
        sink: takes the deltas of all choices in the calls that deliver them, where choice c of
            prompt p has the number `p * n + c`. It is set before the first `wait`.
    """

    requests: Sequence[GenerationRequest]
    sink: Callable[[Delta], None]
    hop: Hop | None = None
    pace = Pace.FULL
    tpot_s = 0.0

    def __init__(self, job: Job, span: Span, watch: Watch) -> None:
        super().__init__(
            job.request_id,
            (),  # until the job is sized
            0,
            job.service,
            job.tenant,
            job.share,
            job.fingerprint,
            job.retries,
        )
        self.job = job
        self.span = span
        self.watch = watch
        self.sink = ignore
        self.resumes: list[Resume] = []
