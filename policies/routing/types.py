"""What a routing policy sees of a request and of the workers, and what it answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from draftgate.policies.capacity import WorkerUsage, active_sequences
from draftgate.policies.types import RequestView, WorkerLoad

Draw = Callable[[], float]
"""A source of randomness: uniform in [0, 1), independent from call to call."""


@dataclass(frozen=True, slots=True)
class RouteView:
    """A request that is to be placed.

    Attributes:
        request: what is known of it: lengths, service level, how drafts of its tenant fared.
        most_tokens: of prompt and output of all its sequences: what is leased for it.
        output_tokens: expected of each sequence.
        sequences: its choices.
        tenant: whose it is.
        block_hashes: of its prompt's full KV blocks, each standing for all before it, the tenant
            included, so no two tenants have one in common; empty where nobody computed them.
        block_tokens: tokens of such a block.
    """

    request: RequestView
    most_tokens: int
    output_tokens: float
    sequences: int = 1
    tenant: str = ""
    block_hashes: Sequence[bytes] = ()
    block_tokens: int = 16


@dataclass(frozen=True, slots=True)
class Candidate:
    """A worker that has room for the request.

    Attributes:
        usage: its load, and what this gateway has sent there that has not ended.
        sent_tokens: of prompt and output that these take at most.
        leased_tokens: of prompt and output, as far as is known here, of requests that the load does
            not include yet.
        age_s: how old the load is; 0 of a worker in this process.
        numerics_class: in which its texts are what others' are; None where nothing is promised.
        own: whether it is this process's.
    """

    worker_id: str
    usage: WorkerUsage
    sent_tokens: int = 0
    leased_tokens: int = 0
    age_s: float = 0.0
    numerics_class: str | None = None
    own: bool = True

    @property
    def load(self) -> WorkerLoad:
        """What it says of itself."""
        return self.usage.load

    @property
    def sequences(self) -> int:
        """Sequences there: those this gateway sent that need a seat, or those that it tells of."""
        return max(active_sequences(self.usage), self.load.running + self.load.waiting)

    @property
    def prompt_tokens(self) -> int:
        """Prompt tokens ahead of a newcomer, by the larger count likewise."""
        return max(self.load.prompt_tokens, self.usage.unstarted_prompt_tokens)

    @property
    def tokens(self) -> int:
        """Tokens on it, leases left out: those this gateway sent, or what its memory holds.

        The larger: the one counts what is still to come, the other what others have sent.
        """
        load = self.load
        return max(
            self.sent_tokens, (load.kv_blocks_total - load.kv_blocks_free) * load.kv_block_tokens
        )


@dataclass(frozen=True, slots=True)
class Candidates:
    """Where a request may go.

    Attributes:
        workers: at least one, each once.
        rivals: other gateways that place requests on the same workers, unseen until the next report
            of those. 0 where there are none, or where an atomic reservation settles who goes where.
    """

    workers: tuple[Candidate, ...]
    rivals: int = 0


@dataclass(frozen=True, slots=True)
class ScoredWorker:
    """What it would cost to place the request on a worker; the least score wins.

    Attributes:
        score: by what is known of the worker but for leases behind its load, in the policy's unit.
        score_per_token: by how much it rises with each token leased there, 0 or more.
        leased_tokens, age_s: the candidate's, for the record.
    """

    worker_id: str
    score: float
    score_per_token: float = 0.0
    leased_tokens: int = 0
    age_s: float = 0.0

    @property
    def level(self) -> float:
        """The score with the leases that are known here."""
        return self.score + self.score_per_token * self.leased_tokens


@dataclass(frozen=True, slots=True)
class Route:
    """A routing decision.

    Attributes:
        policy: the name of the policy that decided.
        offers: the worker that was chosen, then those that might be taken instead, best first: a
            state store that knows all leases takes the one of least score with these.
        reason: the decision in words.
        ttft_s, tpot_s: predicted on the chosen worker; None where nothing was predicted.
        cached_tokens: of the prompt, as far as known to be in the chosen worker's cache.
        draft_tokens: slots of each step that would pay there; None where the price was not asked.
    """

    policy: str
    offers: tuple[ScoredWorker, ...]
    reason: str
    ttft_s: float | None = None
    tpot_s: float | None = None
    cached_tokens: int = 0
    draft_tokens: int | None = None

    @property
    def worker_id(self) -> str:
        """The worker that was chosen."""
        return self.offers[0].worker_id
