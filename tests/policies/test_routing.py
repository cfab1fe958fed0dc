"""Routing: choices, stale loads, other gateways, and the recorded reasons."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftgate.policies.capacity import WorkerUsage
from draftgate.policies.protocols import RoutingPolicy
from draftgate.policies.registry import routing_policy
from draftgate.policies.routing.placement_history import STRIDE, PlacementHistory
from draftgate.policies.routing.prediction import predict
from draftgate.policies.routing.scoring import OVERLOAD, SCORERS
from draftgate.policies.routing.selection import fill_levels
from draftgate.policies.routing.types import Candidate, Candidates, Route, RouteView, ScoredWorker
from draftgate.policies.testing import check_routing
from draftgate.policies.types import (
    DraftCounts,
    RequestView,
    SpeculationMode,
    WorkerLoad,
    WorkerSpeed,
)

SPECS = (
    "round_robin",
    "least_loaded",
    "power_of_two",
    "prefix_affinity",
    "least_cost",
    "least_cost:undrafted",
    "weighted:prefix=2,load=1",
    "weighted:latency,staleness=0.5,price=0.1",
)
SPEED = WorkerSpeed(0.02, 1e-4, 1e-4, 0.01, 1e-4, 2e-5)
ASKED = RouteView(RequestView(1000, 200, 0.8), 1200, 200.0)


def test_price_is_still_accepted_as_a_name_of_least_cost() -> None:
    """`--routing price`, as in 0.1.0, builds the renamed policy, with its argument."""
    assert routing_policy("price").name == "least_cost"
    assert routing_policy("price:undrafted").name == "least_cost:undrafted"


def load(**fields: object) -> WorkerLoad:
    """An idle worker that runs 64 sequences and has memory for 16,000 tokens."""
    given = {"kv_blocks_free": 1000, "kv_blocks_total": 1000, "max_sequences": 64, "speed": SPEED}
    values = {"running": 0, "waiting": 0, "price": 0.0, "acceptance": 0.6, "proposers": ("ngram",)}
    return WorkerLoad(**{**values, **given, **fields})


def worker(number: int, sent_tokens: int = 0, **fields: object) -> Candidate:
    """A worker of this process to which this number of tokens was sent."""
    report = load(**fields)
    at = WorkerUsage(report, report.running + report.waiting, report.running)
    return Candidate(f"w-{number}", at, sent_tokens)


def carrying(*tokens: int, **fields: object) -> Candidates:
    """Workers with these numbers of tokens."""
    return Candidates(tuple(worker(n, sent, **fields) for n, sent in enumerate(tokens)))


def asked(
    policy: RoutingPolicy, candidates: Candidates, request: RouteView = ASKED, seed: int = 0
) -> Route:
    """Return a decision that the policy does not learn."""
    return policy.route(request, candidates, Random(seed).random)


def placed(
    policy: RoutingPolicy, candidates: Candidates, request: RouteView = ASKED, seed: int = 0
) -> int:
    """Return the place of the chosen worker; the policy learns the decision."""
    route = asked(policy, candidates, request, seed)
    place = [one.worker_id for one in candidates.workers].index(route.worker_id)
    policy.placed(request, candidates.workers[place])
    return place


def chain(tenant: str, blocks: int) -> tuple[bytes, ...]:
    """Hashes of a tenant's prompt; prompts of other lengths share their prefix."""
    return tuple(f"{tenant}/{block}".encode() for block in range(blocks))


def prompt(tenant: str, blocks: int) -> RouteView:
    """A request with a prompt of this number of blocks."""
    tokens = 16 * blocks
    known = RequestView(tokens, 100, 0.8)
    return RouteView(known, tokens + 100, 100.0, 1, tenant, chain(tenant, blocks))


# --- all of them ---------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", SPECS)
def test_conformance(spec: str) -> None:
    """Every shipped policy keeps the contract of `RoutingPolicy`, and is found by its name."""
    policy = routing_policy(spec)
    assert isinstance(policy, RoutingPolicy)
    assert policy.name == spec
    assert routing_policy(spec) is not policy
    check_routing(lambda: routing_policy(spec))


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (
            "nearest",
            r"known: least_cost\[:undrafted\], .*, power_of_two, prefix_affinity, round_robin",
        ),
        ("round_robin:2", "takes no argument"),
        ("price:cheap", "no argument but `undrafted`"),
        ("weighted", "unknown scorer ''"),
        ("weighted:luck=1", "unknown scorer 'luck'.*latency, load, prefix, price, staleness"),
        ("weighted:load=1,load=2", "named twice"),
        ("weighted:load=-1", "above 0"),
        ("weighted:load=much", "above 0, not 'much'"),
        ("weighted:load=inf", "above 0"),
    ],
)
def test_invalid_specs_are_refused_with_the_valid_ones(spec: str, words: str) -> None:
    """The error names the policy, scorer or weight."""
    with pytest.raises(ValueError, match=words):
        routing_policy(spec)


@given(
    st.sampled_from(SPECS),
    st.lists(
        st.tuples(st.integers(0, 10_000), st.integers(0, 64), st.integers(0, 9000)), min_size=1
    ),
    st.integers(0, 20),
    st.integers(0, 3),
)
def test_some_candidate_is_always_chosen(spec, there, rivals, seed) -> None:
    """For any workers and loads, each is offered once, and alternatives are sorted best first."""
    workers = tuple(
        replace(worker(n, sent, running=running), leased_tokens=leased, age_s=float(n % 3))
        for n, (sent, running, leased) in enumerate(there)
    )
    route = asked(routing_policy(spec), Candidates(workers, rivals), seed=seed)
    offered = [offer.worker_id for offer in route.offers]
    assert set(offered) <= {one.worker_id for one in workers}
    assert len(offered) == len(set(offered)) <= 64
    rest = [offer.level for offer in route.offers[1:]]
    assert rest == sorted(rest)


# --- the baselines -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "chosen"), [([0], 0), ([0, 0], 0), ([5, 3], 1), ([7, 7, 7], 0), ([9, 4, 4], 1)]
)
def test_least_loaded_takes_the_fewest_tokens(tokens: list[int], chosen: int) -> None:
    """Of equal workers it takes the first."""
    assert placed(routing_policy("least_loaded"), carrying(*tokens)) == chosen


def test_equal_workers_take_turns() -> None:
    """The worker after the last chosen one is next."""
    policy = routing_policy("least_loaded")
    assert [placed(policy, carrying(0, 0, 0)) for _ in range(4)] == [0, 1, 2, 0]
    assert placed(policy, carrying(5, 9, 5)) == 2
    assert placed(policy, carrying(0, 0, 7)) == 0


def test_round_robin_takes_turns_whatever_the_load() -> None:
    """Every worker gets every n-th request, even if one is sometimes missing."""
    policy = routing_policy("round_robin")
    assert [placed(policy, carrying(9, 0, 5)) for _ in range(7)] == [0, 1, 2, 0, 1, 2, 0]
    workers = carrying(0, 0, 0).workers
    assert placed(policy, Candidates((workers[0], workers[2]))) == 1
    assert placed(policy, Candidates(workers)) == 0


def test_tokens_of_other_gateways_count() -> None:
    """A worker that other gateways have filled is not idle."""
    workers = (worker(0, 0, kv_blocks_free=500), worker(1, 4000))
    assert workers[0].tokens == 8000
    assert placed(routing_policy("least_loaded"), Candidates(workers)) == 1
    leased = (replace(worker(0), leased_tokens=5000), worker(1, 4000))
    assert placed(routing_policy("least_loaded"), Candidates(leased)) == 1


@given(st.lists(st.integers(0, 1000), min_size=3, max_size=9, unique=True), st.integers(0, 99))
def test_power_of_two_never_takes_the_most_loaded_of_three(tokens, seed) -> None:
    """Two workers are drawn, and the better one is taken."""
    route = asked(routing_policy("power_of_two"), carrying(*tokens), seed=seed)
    first, second = route.offers
    assert first.level < second.level
    assert first.worker_id != f"w-{tokens.index(max(tokens))}"


def test_power_of_two_draws_all_pairs_equally_often() -> None:
    """Of four workers, each pair is drawn in about a sixth of all decisions."""
    policy, draw = routing_policy("power_of_two"), Random(7).random
    pairs = Counter(
        frozenset(
            offer.worker_id for offer in policy.route(ASKED, carrying(1, 2, 3, 4), draw).offers
        )
        for _ in range(6000)
    )
    assert len(pairs) == 6
    assert all(880 <= count <= 1120 for count in pairs.values())  # 4 standard deviations


# --- prefixes ------------------------------------------------------------------------------------


def test_prefix_affinity_follows_the_prompt_until_overload() -> None:
    """The same prefix returns to its worker, regardless of other prompts of the tenant."""
    policy = routing_policy("prefix_affinity")
    assert policy.reads_prompts
    assert placed(policy, carrying(9, 0, 9), prompt("a", 64)) == 1
    assert placed(policy, carrying(0, 900, 0), prompt("a", 100)) == 1
    assert placed(policy, carrying(0, 900, 0), prompt("b", 100)) != 1
    heavy = int(3 * OVERLOAD * 2000) + 1
    assert placed(policy, carrying(0, heavy, 0), prompt("a", 100)) != 1


def test_prefix_affinity_without_hashes_is_least_loaded() -> None:
    """Without hashes no cache is known, so tokens decide."""
    policy = routing_policy("prefix_affinity")
    assert [placed(policy, carrying(9, 4, 7)) for _ in range(3)] == [1, 1, 1]


CHAINS = st.lists(
    st.tuples(st.sampled_from("abcdefgh"), st.sampled_from("xyz"), st.integers(0, 200)), max_size=40
)


@given(CHAINS, st.integers(1, 40))
def test_history_is_bounded_and_never_overstates_the_cache(notes, room) -> None:
    """No worker has more entries than its cache, and a prompt counts only as far as it was sent."""
    index, longest = PlacementHistory(), Counter[tuple[str, str]]()
    for tenant, name, blocks in notes:
        index.record(name, chain(tenant, blocks), room * STRIDE)
        longest[tenant, name] = max(longest[tenant, name], blocks)
        assert len(index) <= 3 * room
        known = index.cached_blocks(name, chain(tenant, blocks))
        assert known == min(blocks // STRIDE, room) * STRIDE  # the beginning lasts longest
        for other in "abcdefgh":
            for elsewhere in "xyz":
                known = index.cached_blocks(elsewhere, chain(other, 200))
                assert known <= longest[other, elsewhere]
                assert known % STRIDE == 0


def test_history_forgets_workers_that_left() -> None:
    """Workers that join and leave do not fill the history."""
    index = PlacementHistory(most_workers=3)
    for number in range(10):
        index.record(f"w-{number}", chain("a", 80), 0)
        index.record("stays", chain("b", 80), 0)
    assert index.cached_blocks("stays", chain("b", 80)) == 80
    assert index.cached_blocks("w-9", chain("a", 80)) == 80
    assert index.cached_blocks("w-1", chain("a", 80)) == 0
    assert len(index) == 30


# --- price ---------------------------------------------------------------------------------------


def cheapest(*workers: Candidate, request: RouteView = ASKED) -> int:
    """Return the place that a new `least_cost` chooses."""
    return placed(routing_policy("least_cost"), Candidates(workers), request)


def test_least_cost_weighs_backlog_batch_speed_and_cache() -> None:
    """Each of these factors decides between otherwise equal workers."""
    assert cheapest(worker(0, prompt_tokens=4000), worker(1)) == 1
    assert cheapest(worker(0, running=8), worker(1, running=2)) == 1
    slow = replace(SPEED, step_s=0.02, step_token_s=4e-5)
    assert cheapest(worker(0, speed=slow), worker(1)) == 1
    assert cheapest(worker(0, running=64, waiting=4), worker(1, running=60)) == 1
    policy = routing_policy("least_cost")
    policy.placed(prompt("a", 256), worker(1))
    assert placed(policy, carrying(0, 0, 0), prompt("a", 256)) == 1


def test_faster_worker_gets_more_but_not_everything() -> None:
    """The delay of other requests counts, so the fast worker never fills until it is as slow."""
    policy, slow = routing_policy("least_cost"), replace(SPEED, step_s=0.02, step_sequence_s=2e-4)
    counts = [0, 0]
    for _ in range(300):
        workers = (worker(0, running=counts[0]), worker(1, running=counts[1], speed=slow))
        counts[placed(policy, Candidates(workers))] += 1
    tpots_s = [
        predicted.tpot_s
        for predicted in predict(
            ASKED,
            (worker(0, running=counts[0]), worker(1, running=counts[1], speed=slow)),
            (0, 0),
        )
    ]
    assert counts[0] > counts[1] > 0
    assert tpots_s[0] < tpots_s[1]


def test_nearly_equal_idle_workers_take_turns() -> None:
    """Speeds are measured, so a worker that seems 2% faster must not get every request."""
    policy = routing_policy("least_cost")
    speeds = [replace(SPEED, step_s=0.01 * times) for times in (1.02, 1.0, 1.01)]
    workers = tuple(worker(number, speed=speed) for number, speed in enumerate(speeds))
    taken = Counter(placed(policy, Candidates(workers)) for _ in range(30))
    assert taken == {0: 10, 1: 10, 2: 10}


def test_without_known_speed_tokens_decide() -> None:
    """Upstreams are chosen as by `least_loaded`, and the reason says so."""
    policy, unknown = (
        routing_policy("least_cost"),
        {"speed": WorkerSpeed(0.02, 1e-4), "max_sequences": 0},
    )
    route = asked(policy, carrying(9, 4, 7, **unknown))
    assert route.worker_id == "w-1"
    assert route.ttft_s is None
    assert "no speed is known" in route.reason
    assert [placed(policy, carrying(0, 0, **unknown)) for _ in range(4)] == [0, 1, 0, 1]


def test_worker_without_speed_counts_as_average() -> None:
    """A worker of unknown speed is neither avoided nor flooded."""
    fresh = worker(0, speed=WorkerSpeed())
    assert cheapest(fresh, worker(1, running=3)) == 0
    assert cheapest(replace(fresh, usage=WorkerUsage(load(running=5), 5, 5)), worker(1)) == 1


def test_placement_and_drafts_are_one_decision() -> None:
    """Of two equally fast workers, a request with good drafts avoids the one with expensive slots.

    Other requests, and `:undrafted`, see no difference.
    """
    good = replace(ASKED.request, tenant_drafts=DraftCounts(900.0, 50.0))
    drafting = replace(ASKED, request=good)
    plain = replace(ASKED, request=replace(good, mode=SpeculationMode.OFF))
    cheap = worker(0, 10, running=16, price=0.05)
    expensive = worker(1, 10, running=16, price=0.9)
    route = asked(routing_policy("least_cost"), Candidates((expensive, cheap)), drafting)
    assert route.worker_id == "w-0"
    assert route.draft_tokens >= 4
    assert route.offers[0].level < 0.5 * route.offers[1].level
    for spec, request in (("least_cost", plain), ("least_cost:undrafted", drafting)):
        offers = asked(routing_policy(spec), Candidates((expensive, cheap)), request).offers
        assert offers[0].level == pytest.approx(offers[1].level)


@given(
    st.integers(0, 63),
    st.integers(0, 20_000),
    st.integers(0, 999),
    st.floats(0.0, 1.0),
    st.floats(0.0, 5.0),
)
def test_cost_rises_with_load_and_falls_with_cached_tokens(
    running, ahead, cached, price, age_s
) -> None:
    """The cost follows every sequence, prompt token and lease."""
    at = worker(0, running=running, prompt_tokens=ahead, price=price)
    busier = worker(0, running=running + 1, prompt_tokens=ahead, price=price)
    behind = worker(0, running=running, prompt_tokens=ahead + 100, price=price)
    old = replace(at, age_s=age_s)
    (one,), (more,), (longer,), (aged,), (known,) = (
        predict(ASKED, (candidate,), (tokens,))
        for candidate, tokens in ((at, 0), (busier, 0), (behind, 0), (old, 0), (at, cached))
    )
    assert one.score.value <= more.score.value
    assert one.score.value < longer.score.value
    assert aged.score.value <= one.score.value
    assert known.score.value <= one.score.value
    assert known.ttft_s <= one.ttft_s
    assert one.score.per_token > 0.0


# --- stale loads and other gateways ---------------------------------------------------------------


@given(
    st.lists(st.tuples(st.floats(0.0, 100.0), st.floats(0.01, 10.0)), min_size=1, max_size=12),
    st.floats(0.1, 1000.0),
)
def test_fill_levels_reaches_one_common_level(there, tokens) -> None:
    """All tokens are placed, and places without tokens are already above that level."""
    there.sort()
    levels, rises = [level for level, _ in there], [rise for _, rise in there]
    fills = fill_levels(levels, rises, tokens)
    assert sum(fills) == pytest.approx(tokens)
    surfaces = [
        level + rise * fill for level, rise, fill in zip(levels, rises, fills, strict=True) if fill
    ]
    assert max(surfaces) == pytest.approx(min(surfaces))
    dry = [level for level, fill in zip(levels, fills, strict=True) if not fill]
    assert all(level >= max(surfaces) - 1e-6 for level in dry)


@pytest.mark.parametrize("spec", ["least_cost", "weighted:load=1"])
def test_rivals_that_see_the_same_old_loads_do_not_herd(spec: str) -> None:
    """1,600 decisions by one report even it out, within chance.

    Without rivals, all decisions take the least loaded worker.
    """
    report = (0, 4000, 8000, 16_000)

    def counts(rivals: int) -> Counter[str]:
        workers = tuple(
            replace(
                worker(n, 0, kv_blocks_free=1000 - sent // 16, prompt_tokens=sent, max_sequences=0),
                age_s=0.001,
                own=False,
            )
            for n, sent in enumerate(report)
        )
        policy, draw = routing_policy(spec), Random(3).random
        fed = RouteView(RequestView(1200, 1, 0.0), 1200, 0.0)
        return Counter(
            policy.route(fed, Candidates(workers, rivals), draw).worker_id for _ in range(1600)
        )

    assert counts(0) == {"w-0": 1600}
    # 16 requests of 1,200 tokens fill the first three to 10,400 tokens.
    expected = {"w-0": 10_400, "w-1": 6400, "w-2": 2400}
    found = counts(15)
    assert found.keys() == expected.keys()
    for name, tokens in expected.items():
        assert found[name] == pytest.approx(1600 * tokens / 19_200, rel=0.15)


def at_ages(*ages_s: float, leased_tokens: int = 0, **fields: object) -> tuple[Candidate, ...]:
    """Workers that differ only in the age of their loads."""
    return tuple(
        replace(worker(n, **fields), age_s=age_s, leased_tokens=leased_tokens, own=False)
        for n, age_s in enumerate(ages_s)
    )


def scores(workers: tuple[Candidate, ...], gateways: int = 1) -> list[float]:
    """Return the cost of a request on each worker, without leases."""
    found = predict(ASKED, workers, [0] * len(workers), gateways=gateways)
    assert found is not None
    return [one.score.value for one in found]


def test_age_of_reports_does_not_matter_for_idle_workers() -> None:
    """Without work, elapsed time changes nothing."""
    fresh, old = scores(at_ages(0.0, 1.0))
    assert fresh == old


def test_leases_after_an_old_report_are_partly_processed() -> None:
    """Of two workers with equal leases, the one with the older report has processed more."""
    plenty = round(1.0 / SPEED.step_token_s) * 2
    fresh, old = scores(at_ages(0.0, 1.0, leased_tokens=plenty))
    assert fresh - old == pytest.approx(1.0)
    little = round(0.1 / SPEED.step_token_s)
    fresh, old = scores(at_ages(0.0, 1.0, leased_tokens=little))
    assert 0.0 < fresh - old < 0.1


def test_assumed_leases_of_rivals_keep_workers_busy() -> None:
    """Every other gateway is assumed to have leased as much as this one."""
    little = round(0.1 / SPEED.step_token_s)
    (fresh, old), (fresh_beside, old_beside) = (
        scores(at_ages(0.0, 1.0, leased_tokens=little), gateways) for gateways in (1, 30)
    )
    assert fresh_beside - old_beside > fresh - old
    assert fresh_beside - old_beside == pytest.approx(1.0)


@given(st.lists(st.tuples(st.integers(0, 60_000), st.floats(0, 5), st.integers(0, 60_000))))
def test_score_falls_by_at_most_the_age_of_the_report(there) -> None:
    """The predicted time is never below the request's own."""
    workers = tuple(
        replace(worker(n, prompt_tokens=ahead), age_s=age_s, leased_tokens=leased)
        for n, (ahead, age_s, leased) in enumerate([*there, (0, 0.0, 0)])
    )
    now = tuple(replace(one, age_s=0.0) for one in workers)
    for one, aged, score, fresh in zip(
        workers, predict(ASKED, workers, [0] * len(workers)), scores(workers), scores(now),
        strict=True,
    ):  # fmt: skip
        assert 0.0 <= fresh - score <= one.age_s + 1e-9
        assert aged.ttft_s > 0.0


def _least_with(route: Route, leased: dict[str, int]) -> ScoredWorker:
    """Return the choice of a state store that knows all leases."""
    return min(
        route.offers,
        key=lambda offer: offer.score + offer.score_per_token * leased[offer.worker_id],
    )


def test_reservation_takes_the_least_score_with_all_leases() -> None:
    """As leases accumulate, the best offers of an old report lose to others."""
    route = asked(routing_policy("least_cost"), carrying(0, 0, 0, 0))
    leased = dict.fromkeys((offer.worker_id for offer in route.offers), 0)
    for _ in range(40):
        chosen = _least_with(route, leased)
        leased[chosen.worker_id] += ASKED.most_tokens
    assert set(leased.values()) == {10 * ASKED.most_tokens}
    assert _least_with(route, dict.fromkeys(leased, 0)).worker_id == route.worker_id


def test_of_many_workers_the_best_64_are_offered() -> None:
    """The chosen worker is first, and the number of offers is bounded."""
    route = asked(routing_policy("least_loaded"), carrying(*range(500, 300, -1)))
    assert len(route.offers) == 64
    assert route.worker_id == "w-199"


# --- scorers -------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(0, 9000), st.floats(0, 9), st.floats(0, 3)), min_size=1))
def test_scores_are_from_0_to_1(there) -> None:
    """Every scorer stays in this range, so that weights are comparable."""
    workers = [
        replace(worker(n, sent, price=price), age_s=age_s)
        for n, (sent, age_s, price) in enumerate(there)
    ]
    for scorer in SCORERS.values():
        for score in scorer(ASKED, workers, PlacementHistory()):
            assert 0.0 <= score.value <= 1.0
            assert score.per_token >= 0.0


def test_weights_decide_between_scorers() -> None:
    """The heavier scorer wins, and the reason names it."""
    for spec, chosen in (("weighted:prefix=3,load", 1), ("weighted:prefix,load=3", 2)):
        policy = routing_policy(spec)
        policy.placed(prompt("a", 64), worker(1))
        route = asked(policy, carrying(0, 700, 0), prompt("a", 64))
        assert route.worker_id == f"w-{chosen}"
        assert "load 0." in route.reason
