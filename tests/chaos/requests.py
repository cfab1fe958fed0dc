"""The distinct requests of a run, and their repetitions at Poisson times."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice, product

from draftgate.loadgen.planning.plan import Load, make_plan
from draftgate.loadgen.types import ChatMessage, PlannedRequest, RequestSpec

DEMO = "draftgate-demo"
"""The shipped model."""

SIMULATED = "simulated"
UPSTREAM = "upstream"

TEMPERATURES = (0.0, 0.8)


@dataclass(frozen=True)
class ModelLoad:
    """The requests for one model.

    Attributes:
        share: share of the model's requests in the load.
        modes: modes of speculation.
        lengths: output limits in tokens, of which the long ones outlast a fault.
        distinct: number of distinct requests, which bounds the time to compute the expected texts.
    """

    share: float
    modes: tuple[str, ...]
    lengths: tuple[int, ...]
    distinct: int


LOADS = {
    DEMO: ModelLoad(0.4, ("off", "auto", "ngram", "draft_model"), (12, 48, 160), 48),
    SIMULATED: ModelLoad(0.45, ("off", "auto", "ngram"), (16, 120, 600), 54),
    UPSTREAM: ModelLoad(0.15, ("off", "auto"), (16, 120), 16),
}


@dataclass(frozen=True)
class DistinctRequest:
    """A request that a run repeats.

    Attributes:
        key: a name that is unique and the same in each run with the seed.
    """

    key: str
    model: str
    spec: RequestSpec

    def planned(self, index: int, at_s: float | None = None) -> PlannedRequest:
        """Return a repetition."""
        return PlannedRequest(index, at_s, self.spec)

    def without_drafts(self) -> DistinctRequest:
        """Return the request without speculation."""
        extra = dict(self.spec.extra) | {"speculation": {"mode": "off"}}
        return replace(self, spec=replace(self.spec, extra=tuple(extra.items())))


def distinct_requests(seed: int) -> list[DistinctRequest]:
    """Return greedy and sampled completions and chats, with and without drafts, for all models."""
    return [one for model in LOADS for one in _requests_for(model, seed)]


def schedule(
    requests: Sequence[DistinctRequest], rate_rps: float, seed: str
) -> Iterator[tuple[float, DistinctRequest]]:
    """Yield requests at Poisson times, in seconds from the start, without end."""
    rng, at_s = random.Random(f"load/{seed}"), 0.0
    weights = [LOADS[one.model].share / LOADS[one.model].distinct for one in requests]
    while True:
        at_s += rng.expovariate(rate_rps)
        yield at_s, rng.choices(requests, weights)[0]


def _requests_for(model: str, seed: int) -> Iterator[DistinctRequest]:
    load, rng = LOADS[model], random.Random(f"requests/{model}/{seed}")
    kinds = list(product(TEMPERATURES, load.modes, load.lengths, (False, True)))
    rng.shuffle(kinds)
    plan = make_plan(
        Load(workload="code", rate_rps=1.0, duration_s=1e4, seed=seed),
        max_model_len=512,
        lazily=True,
    )
    for number, planned in enumerate(islice(plan.requests, load.distinct)):
        temperature, mode, max_tokens, is_chat = kinds[number % len(kinds)]
        prompt = planned.request.prompt
        assert prompt is not None
        prompt = prompt[-rng.choice((40, 400)) :]
        yield DistinctRequest(
            f"{model}/{number}",
            model,
            RequestSpec(
                None if is_chat else prompt,
                (ChatMessage("user", prompt),) if is_chat else (),
                max_tokens,
                seed=rng.randrange(1 << 30),
                class_name=f"{model} {'chat' if is_chat else 'completion'} {mode}",
                extra=(
                    ("temperature", temperature),
                    ("ignore_eos", True),
                    ("speculation", {"mode": mode}),
                ),
            ),
        )
