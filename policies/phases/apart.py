"""`apart` and `splitwise`: one pool of workers for prompts, and another one for outputs.

The prompt goes to the worker with the fewest prompt tokens ahead, and the output to the worker with
the most free memory (Splitwise, arXiv 2311.18677). A worker whose role is `any` is in both pools.

With `apart`, a request waits while a pool has no capacity. With `splitwise`, a pool borrows a
worker of the other one meanwhile. Such a worker is *mixed* until it has finished the borrowed work,
so the choice follows from the loads, and the policy has no state. The gateway sends a worker only
the prompts of its next steps, which replaces Splitwise's limit on queued tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from draftgate.policies.phases.types import (
    Apart,
    PhaseChoice,
    PhasePool,
    PhaseWorker,
    Together,
    of_role,
    suppliers,
)
from draftgate.policies.routing.selection import Score, rank
from draftgate.policies.routing.types import Candidate, Candidates, RouteView, ScoredWorker
from draftgate.policies.types import Role

NO_EXCHANGE = "no two of these workers exchange KV blocks"


class Separate:
    """`apart`: separates the phases of every request with output, as in DistServe."""

    name = "apart"
    separates = True

    def choose(self, request: RouteView, pool: PhasePool) -> PhaseChoice:
        prefill, decode = of_role(pool.workers, Role.PREFILL), of_role(pool.workers, Role.DECODE)
        if request.request.max_tokens <= 1:
            return _alone(prefill)
        sources = list(suppliers(prefill, decode))
        if not sources:
            return Together(_ids(pool.usable), NO_EXCHANGE)
        source = _best(_usable(sources), _pending(request))
        return None if source is None else _pair(request, source, _usable(sources), decode)


class Splitwise:
    """`splitwise`: separates the phases, and borrows workers of the other pool."""

    name = "splitwise"
    separates = True

    def choose(self, request: RouteView, pool: PhasePool) -> PhaseChoice:
        prefill = _nearest(pool.usable, _borrowed_for_prompts)
        if request.request.max_tokens <= 1:
            return _alone(prefill)
        source = _best(prefill, _pending(request))
        if source is None:
            return None
        decode = _nearest(pool.usable, _borrowed_for_outputs)
        own = (source.worker_id,)
        if source is _best(decode, _used):
            return Together(own, f"{source.worker_id} serves both pools")
        choice = _pair(request, source, prefill, decode)
        return choice or Together(own, f"no other worker takes the output of {source.worker_id}")


def _borrowed_for_prompts(worker: PhaseWorker) -> int:
    """Return 0 for workers of the pool, 1 for mixed ones and 2 for those of the other pool."""
    if worker.role is Role.PREFILL:
        return 0
    return 1 if worker.role is Role.ANY or worker.candidate.prompt_tokens else 2


def _borrowed_for_outputs(worker: PhaseWorker) -> int:
    """Return the same order for outputs. A worker with borrowed prompts is mixed."""
    if worker.role is Role.PREFILL:
        return 2
    return 1 if worker.role is Role.ANY or worker.candidate.prompt_tokens else 0


def _nearest(
    workers: Sequence[PhaseWorker], distance: Callable[[PhaseWorker], int]
) -> list[PhaseWorker]:
    nearest = min(map(distance, workers), default=0)
    return [one for one in workers if distance(one) == nearest]


def _alone(workers: Sequence[PhaseWorker]) -> Together | None:
    """Return the choice for a request that ends with its first token."""
    usable = _usable(workers)
    return Together(_ids(usable), "the request has no further tokens") if usable else None


def _pair(
    request: RouteView,
    source: PhaseWorker,
    prefill: Sequence[PhaseWorker],
    decode: Sequence[PhaseWorker],
) -> Apart | None:
    """Return the choice of a worker for the prompt and the best one for the output, if any."""
    sinks = [one for one in _usable(decode) if source.can_supply(one)]
    sink = _best(sinks, _used)
    if sink is None:
        return None
    pending = source.candidate.prompt_tokens
    free = sink.candidate.load.kv_total_tokens - sink.candidate.tokens
    words = (
        f"prompt on {source.worker_id} with {pending} prompt tokens ahead, "
        f"output on {sink.worker_id} with {max(free, 0)} tokens free"
    )
    sources = [one for one in prefill if one.can_supply(sink)]
    return Apart(_ranked(sources, _pending(request)), _ranked(sinks, _used), words)


def _pending(request: RouteView) -> Callable[[Candidate], Score]:
    """Return a score by the prompt tokens that a worker computes until the end of the prompt."""
    own, most = request.request.prompt_tokens, max(request.most_tokens, 1)
    return lambda one: Score(float(one.prompt_tokens + own - one.cached_tokens), own / most)


def _used(worker: Candidate) -> Score:
    """Return a score by the tokens of memory that are not free, which is usually negative."""
    return Score(float(worker.tokens - worker.load.kv_total_tokens), 1.0)


def _ranked(
    workers: Sequence[PhaseWorker], score: Callable[[Candidate], Score]
) -> tuple[ScoredWorker, ...]:
    candidates = tuple(worker.candidate for worker in workers)
    return tuple(rank(Candidates(candidates), [score(one) for one in candidates], ""))


def _best(
    workers: Sequence[PhaseWorker], score: Callable[[Candidate], Score]
) -> PhaseWorker | None:
    first = next(iter(_ranked(workers, score)), None)
    return next((one for one in workers if first and one.worker_id == first.worker_id), None)


def _usable(workers: Sequence[PhaseWorker]) -> list[PhaseWorker]:
    return [one for one in workers if one.has_capacity]


def _ids(workers: Sequence[PhaseWorker]) -> tuple[str, ...]:
    return tuple(one.worker_id for one in workers)


# --- Upstreams with roles -------------------------------------------------------------------------


class UpstreamRoles:
    """Separates the phases of a request if upstreams have roles and much of its prompt is uncached.

    The servers exchange KV blocks themselves, in formats and over links that the gateway does not
    know. The number of tokens that the output's upstream would compute therefore decides.
    """

    name = "upstream_roles"
    separates = True

    def __init__(self, least_tokens: int) -> None:
        """Separate the phases of requests with at least this number of uncached prompt tokens."""
        self._least_tokens = least_tokens

    def choose(self, request: RouteView, pool: PhasePool) -> PhaseChoice:
        if all(one.role is Role.ANY for one in pool.workers):
            return Together(_ids(pool.usable), "no upstream has a role")
        output_tokens = request.request.max_tokens
        if not output_tokens:
            return Together(_ids(pool.usable), "the request has no output")
        if output_tokens == 1:
            return _alone(of_role(pool.workers, Role.PREFILL))
        decode = [one for one in pool.workers if one.role is not Role.PREFILL]
        if not decode:
            return Together(_ids(pool.usable), "no upstream for outputs is available")
        sinks = _usable(decode)
        if not sinks:
            return None
        if not request.may_separate or request.sequences > 1:
            return Together(_ids(sinks), "the output needs the whole prompt")
        prompt_tokens = request.request.prompt_tokens
        near = [
            one for one in sinks if prompt_tokens - one.candidate.cached_tokens < self._least_tokens
        ]
        if near:
            return Together(_ids(near), f"fewer than {self._least_tokens} uncached prompt tokens")
        sink = _best(sinks, _used)
        sources = [one for one in pool.workers if one.role is not Role.DECODE and one is not sink]
        if not sources:
            return Together(_ids(sinks), "no upstream for prompts is available")
        source = _best(_usable(sources), _pending(request))
        if source is None or sink is None:
            return None
        outputs = [one for one in sinks if one is not source]
        prompts = [one for one in _usable(sources) if one not in outputs]
        words = (
            f"prompt on {source.worker_id} with {source.candidate.prompt_tokens} prompt tokens "
            f"ahead, output on {sink.worker_id} with {sink.candidate.sequences} sequences"
        )
        return Apart(_ranked(prompts, _pending(request)), _ranked(outputs, _used), words)


# --- `together`: compute the prompt and the output of every request on one worker -----------------


class OneWorker:
    """Lets the routing policy choose among all workers, whatever their roles."""

    name = "together"
    separates = False

    def choose(self, request: RouteView, pool: PhasePool) -> PhaseChoice:
        ids = tuple(worker.worker_id for worker in pool.usable)
        return Together(ids, "requests stay on one worker")
