"""The inputs and results of a routing policy."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from draftgate.policies.capacity import WorkerUsage, active_sequences
from draftgate.policies.types import RequestView, WorkerLoad
from draftgate.policies.values import immutable

Draw = Callable[[], float]
"""A source of random numbers, uniform in [0, 1) and independent from call to call."""


@immutable
class CachedPrefix:
    """The beginning of a prompt that a worker has cached.

    Attributes:
        tokens: number of tokens, less than the prompt has.
        is_exact: whether the worker itself has reported its cache, so that it has no more of the
            prompt. Otherwise it may have more.
    """

    tokens: int
    is_exact: bool = False


@immutable
class RouteView:
    """A request that needs a worker.

    Attributes:
        request: its lengths, service level and the record of its tenant's drafts.
        most_tokens: maximum number of prompt and output tokens of all its sequences, the size of
            its lease.
        output_tokens: expected output tokens of each sequence.
        sequences: number of choices.
        tenant: tenant of the request.
        block_hashes: hashes of the prompt's full KV blocks, or empty if they were not computed.
            Each hash covers all previous blocks and the tenant, so tenants never share a hash.
        block_tokens: number of tokens in a block.
        cached: what workers have cached of the prompt, by worker id, as far as more is known than
            the placements of earlier prompts, or None.
        may_separate: whether another worker may compute its prompt than its output.
        offer: what only some workers have (`CapacityNeed.offer`).
        session: id of its session, which includes its tenant, or empty without one.
        session_worker: id of the worker that ran the last request of its session, or empty if that
            is unknown.
    """

    request: RequestView
    most_tokens: int
    output_tokens: float
    sequences: int = 1
    tenant: str = ""
    block_hashes: Sequence[bytes] = ()
    block_tokens: int = 16
    cached: Mapping[str, CachedPrefix] | None = None
    may_separate: bool = True
    offer: str = ""
    session: str = ""
    session_worker: str = ""


@immutable
class PrefixPull:
    """A part of a prompt that a worker can pull from another worker (`policies.kv_transfer`).

    Attributes:
        tokens: tokens after those that the worker has cached.
        pull_s: predicted seconds of the pull.
        compute_s: predicted seconds in which the worker would compute the tokens, more than
            `pull_s`.
    """

    tokens: int
    pull_s: float
    compute_s: float

    @property
    def saved_tokens(self) -> float:
        """The tokens that the worker could compute in the time that the pull saves."""
        return self.tokens * (1.0 - self.pull_s / self.compute_s)


@immutable
class Candidate:
    """A worker with capacity for the request.

    Attributes:
        usage: its load, and the unfinished requests of this gateway.
        sent_tokens: maximum number of prompt and output tokens of these requests.
        leased_tokens: prompt and output tokens of known requests that the load does not include.
        age_s: age of the load in seconds, or 0 for a worker in this process.
        numerics_class: class of workers that generate identical texts, or None without this
            guarantee.
        own: whether the worker belongs to this process.
        cached_tokens: prompt tokens that are probably in its cache, less than the prompt has.
        pull: the next tokens of the prompt, if the worker would rather pull than compute them over
            a link of known bandwidth.
        promised_sequences: sequences that clients have announced for the next seconds (`promises`).
            `sent_tokens` includes their tokens.
        precedence: place among workers that are otherwise equal, of which the smallest is chosen.
    """

    worker_id: str
    usage: WorkerUsage
    sent_tokens: int = 0
    leased_tokens: int = 0
    age_s: float = 0.0
    numerics_class: str | None = None
    own: bool = True
    cached_tokens: int = 0
    pull: PrefixPull | None = None
    promised_sequences: int = 0
    precedence: int = 0

    @property
    def load(self) -> WorkerLoad:
        """The load that the worker reports."""
        return self.usage.load

    @property
    def sequences(self) -> int:
        """Sequences that this gateway sent, or that the worker reports, whichever is larger.

        Promised sequences are added.
        """
        present = max(active_sequences(self.usage), self.load.running + self.load.waiting)
        return present + self.promised_sequences

    @property
    def prompt_tokens(self) -> int:
        """Prompt tokens ahead of a new request, by the larger of the same two counts."""
        return max(self.load.prompt_tokens, self.usage.unstarted_prompt_tokens)

    @property
    def free_tokens(self) -> int:
        """Tokens of free KV memory, less those of prompts ahead, negative if they do not fit."""
        free_tokens = self.load.kv_free_tokens - self.usage.arriving_tokens
        return free_tokens - max(self.prompt_tokens, self.load.head_tokens)

    @property
    def tokens(self) -> int:
        """Tokens on the worker without leases: tokens sent to it, or tokens in its memory.

        The property is the larger of the two counts. The first count includes future tokens, and
        the second the tokens of other gateways.
        """
        load = self.load
        return max(self.sent_tokens, load.kv_total_tokens - load.kv_free_tokens)


@immutable
class Candidates:
    """The workers that can run the request.

    Attributes:
        workers: candidates, not empty and without repetition.
        rivals: number of other gateways that place requests on the same workers, unseen until the
            next report. 0 if an atomic reservation settles the placement.
    """

    workers: tuple[Candidate, ...]
    rivals: int = 0


@immutable
class ScoredWorker:
    """The cost of placing the request on a worker, in the policy's unit.

    The smallest cost wins.

    Attributes:
        score: cost, without leases that the load does not include.
        score_per_token: rise with each leased token, 0 or more.
        leased_tokens, age_s: values of the candidate, for the decision log.
    """

    worker_id: str
    score: float
    score_per_token: float = 0.0
    leased_tokens: int = 0
    age_s: float = 0.0

    @property
    def level(self) -> float:
        """The score including the known leases."""
        return self.score + self.score_per_token * self.leased_tokens


@immutable
class Route:
    """A routing decision.

    Attributes:
        policy: name of the policy that decided.
        offers: chosen worker, then alternatives, best first. A state store that knows all leases
            takes the offer with the smallest score including leases.
        reason: the decision in words.
        ttft_s, tpot_s: predictions for the chosen worker in seconds, or None.
        cached_tokens: prompt tokens that are probably in the chosen worker's cache.
        draft_tokens: slots per step worth their price on this worker, or None if the policy ignores
            prices.
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
        """The id of the chosen worker."""
        return self.offers[0].worker_id
