"""Routing: who is chosen, what old loads and rivals change, and what a decision rests on."""

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
    """An idle worker of 64 seats with memory for 16,000 tokens."""
    given = {"kv_blocks_free": 1000, "kv_blocks_total": 1000, "max_sequences": 64, "speed": SPEED}
    values = {"running": 0, "waiting": 0, "price": 0.0, "acceptance": 0.6, "proposers": ("ngram",)}
    return WorkerLoad(**{**values, **given, **fields})


def worker(number: int, sent_tokens: int = 0, **fields: object) -> Candidate:
    """A worker of this process with so many tokens sent to it."""
    told = load(**fields)
    at = WorkerUsage(told, told.running + told.waiting, told.running)
    return Candidate(f"w-{number}", at, sent_tokens)


def carrying(*tokens: int, **fields: object) -> Candidates:
    """Workers that carry so many tokens."""
    return Candidates(tuple(worker(n, sent, **fields) for n, sent in enumerate(tokens)))


def asked(
    policy: RoutingPolicy, candidates: Candidates, request: RouteView = ASKED, seed: int = 0
) -> Route:
    """A decision that is not told to the policy."""
    return policy.route(request, candidates, Random(seed).random)


def placed(
    policy: RoutingPolicy, candidates: Candidates, request: RouteView = ASKED, seed: int = 0
) -> int:
    """The place of the worker that is chosen; the policy is told."""
    route = asked(policy, candidates, request, seed)
    place = [one.worker_id for one in candidates.workers].index(route.worker_id)
    policy.placed(request, candidates.workers[place])
    return place


def chain(tenant: str, blocks: int) -> tuple[bytes, ...]:
    """Hashes of a tenant's prompt; one of another length agrees as far as it goes."""
    return tuple(f"{tenant}/{block}".encode() for block in range(blocks))


def prompt(tenant: str, blocks: int) -> RouteView:
    """A request with a prompt of so many blocks."""
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
def test_what_does_not_exist_is_refused_in_words(spec: str, words: str) -> None:
    """A name, a scorer or a weight that cannot be is named, with those that can."""
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
def test_whoever_is_there_one_of_them_is_chosen(spec, there, rivals, seed) -> None:
    """Any number of workers under any load, fresh or old: a candidate is chosen, each offered once,
    and but for the one in front the offers come best first."""
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
def test_the_least_loaded_worker_is_chosen(tokens: list[int], chosen: int) -> None:
    """Fewest tokens win, and the first of equals."""
    assert placed(routing_policy("least_loaded"), carrying(*tokens)) == chosen


def test_equals_are_chosen_in_turn() -> None:
    """Idle workers share what comes: the one behind the last chosen is next."""
    policy = routing_policy("least_loaded")
    assert [placed(policy, carrying(0, 0, 0)) for _ in range(4)] == [0, 1, 2, 0]
    assert placed(policy, carrying(5, 9, 5)) == 2
    assert placed(policy, carrying(0, 0, 7)) == 0


def test_round_robin_takes_turns_whatever_the_load() -> None:
    """Every worker gets every n-th request, also when one is left out now and then."""
    policy = routing_policy("round_robin")
    assert [placed(policy, carrying(9, 0, 5)) for _ in range(7)] == [0, 1, 2, 0, 1, 2, 0]
    workers = carrying(0, 0, 0).workers
    assert placed(policy, Candidates((workers[0], workers[2]))) == 1
    assert placed(policy, Candidates(workers)) == 0


def test_what_others_hold_there_counts_as_well_as_what_was_sent_from_here() -> None:
    """A worker whose memory others have filled is not idle for who has sent it nothing."""
    workers = (worker(0, 0, kv_blocks_free=500), worker(1, 4000))
    assert workers[0].tokens == 8000
    assert placed(routing_policy("least_loaded"), Candidates(workers)) == 1
    leased = (replace(worker(0), leased_tokens=5000), worker(1, 4000))
    assert placed(routing_policy("least_loaded"), Candidates(leased)) == 1


@given(st.lists(st.integers(0, 1000), min_size=3, max_size=9, unique=True), st.integers(0, 99))
def test_power_of_two_never_takes_the_worst_and_spares_the_others_a_look(tokens, seed) -> None:
    """Two are drawn and the better one is taken, so the most loaded of three or more never is."""
    route = asked(routing_policy("power_of_two"), carrying(*tokens), seed=seed)
    first, second = route.offers
    assert first.level < second.level
    assert first.worker_id != f"w-{tokens.index(max(tokens))}"


def test_power_of_two_draws_all_pairs_alike() -> None:
    """Of four workers each pair is drawn in about a sixth of all decisions."""
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


def test_affinity_follows_the_prompt_and_gives_way_to_overload() -> None:
    """The same beginning goes where it was, whatever its tenant's neighbours do; not beyond what
    the mean allows."""
    policy = routing_policy("prefix_affinity")
    assert policy.reads_prompts
    assert placed(policy, carrying(9, 0, 9), prompt("a", 64)) == 1
    assert placed(policy, carrying(0, 900, 0), prompt("a", 100)) == 1
    assert placed(policy, carrying(0, 900, 0), prompt("b", 100)) != 1
    heavy = int(3 * OVERLOAD * 2000) + 1
    assert placed(policy, carrying(0, heavy, 0), prompt("a", 100)) != 1


def test_without_hashes_affinity_is_least_loaded() -> None:
    """Where nobody hashed a prompt, nothing is cached anywhere, and tokens decide."""
    policy = routing_policy("prefix_affinity")
    assert [placed(policy, carrying(9, 4, 7)) for _ in range(3)] == [1, 1, 1]


CHAINS = st.lists(
    st.tuples(st.sampled_from("abcdefgh"), st.sampled_from("xyz"), st.integers(0, 200)), max_size=40
)


@given(CHAINS, st.integers(1, 40))
def test_the_index_is_bounded_and_never_says_more_than_was_seen(notes, room) -> None:
    """However much is noted, no worker has more entries than its cache has room for, and a prompt
    is known only as far as some prompt of its tenant went to that worker."""
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


def test_the_index_forgets_workers_that_are_gone() -> None:
    """Workers that come and go for ever do not fill it."""
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
    """The place that `least_cost` takes when it has seen nothing."""
    return placed(routing_policy("least_cost"), Candidates(workers), request)


def test_price_weighs_backlog_batch_speed_and_cache() -> None:
    """Each by itself decides between workers that are alike otherwise."""
    assert cheapest(worker(0, prompt_tokens=4000), worker(1)) == 1
    assert cheapest(worker(0, running=8), worker(1, running=2)) == 1
    slow = replace(SPEED, step_s=0.02, step_token_s=4e-5)
    assert cheapest(worker(0, speed=slow), worker(1)) == 1
    assert cheapest(worker(0, running=64, waiting=4), worker(1, running=60)) == 1
    policy = routing_policy("least_cost")
    policy.placed(prompt("a", 256), worker(1))
    assert placed(policy, carrying(0, 0, 0), prompt("a", 256)) == 1


def test_a_faster_worker_gets_more_but_not_everything() -> None:
    """Requests that stay are shared between two speeds: what all lose counts, so the fast one is
    not filled until it is as slow as the other."""
    policy, slow = routing_policy("least_cost"), replace(SPEED, step_s=0.02, step_sequence_s=2e-4)
    counts = [0, 0]
    for _ in range(300):
        workers = (worker(0, running=counts[0]), worker(1, running=counts[1], speed=slow))
        counts[placed(policy, Candidates(workers))] += 1
    tpots_s = [
        told.tpot_s
        for told in predict(
            ASKED,
            (worker(0, running=counts[0]), worker(1, running=counts[1], speed=slow)),
            (0, 0),
        )
    ]
    assert counts[0] > counts[1] > 0
    assert tpots_s[0] < tpots_s[1]


def test_idle_workers_that_are_nearly_alike_take_turns() -> None:
    """Speeds are measured: a worker that seems 2 % faster must not get everything."""
    policy = routing_policy("least_cost")
    speeds = [replace(SPEED, step_s=0.01 * times) for times in (1.02, 1.0, 1.01)]
    workers = tuple(worker(number, speed=speed) for number, speed in enumerate(speeds))
    taken = Counter(placed(policy, Candidates(workers)) for _ in range(30))
    assert taken == {0: 10, 1: 10, 2: 10}


def test_where_no_speed_is_known_tokens_decide() -> None:
    """Upstreams, which are seen from outside, are chosen as by `least_loaded`, and it says so."""
    policy, unknown = (
        routing_policy("least_cost"),
        {"speed": WorkerSpeed(0.02, 1e-4), "max_sequences": 0},
    )
    route = asked(policy, carrying(9, 4, 7, **unknown))
    assert route.worker_id == "w-1"
    assert route.ttft_s is None
    assert "no speed is known" in route.reason
    assert [placed(policy, carrying(0, 0, **unknown)) for _ in range(4)] == [0, 1, 0, 1]


def test_who_has_not_run_yet_is_taken_for_as_fast_as_the_others() -> None:
    """A worker that tells no speed among others that do is neither shunned nor stormed."""
    fresh = worker(0, speed=WorkerSpeed())
    assert cheapest(fresh, worker(1, running=3)) == 0
    assert cheapest(replace(fresh, usage=WorkerUsage(load(running=5), 5, 5)), worker(1)) == 1


def test_placement_and_drafts_are_one_decision() -> None:
    """Of two workers that take the same time, one with dear slots: a request whose drafts go well
    is sent where they pay; to one that may not draft, and to who does not look, all is the same."""
    good = replace(ASKED.request, tenant_drafts=DraftCounts(900.0, 50.0))
    drafting = replace(ASKED, request=good)
    plain = replace(ASKED, request=replace(good, mode=SpeculationMode.OFF))
    cheap = worker(0, 10, running=16, price=0.05)
    dear = worker(1, 10, running=16, price=0.9)
    route = asked(routing_policy("least_cost"), Candidates((dear, cheap)), drafting)
    assert route.worker_id == "w-0"
    assert route.draft_tokens >= 4
    assert route.offers[0].level < 0.5 * route.offers[1].level
    for spec, request in (("least_cost", plain), ("least_cost:undrafted", drafting)):
        offers = asked(routing_policy(spec), Candidates((dear, cheap)), request).offers
        assert offers[0].level == pytest.approx(offers[1].level)


@given(
    st.integers(0, 63),
    st.integers(0, 20_000),
    st.integers(0, 999),
    st.floats(0.0, 1.0),
    st.floats(0.0, 5.0),
)
def test_more_to_do_is_never_better_and_more_in_the_cache_never_worse(
    running, ahead, cached, price, age_s
) -> None:
    """Costs rise with every sequence, prompt token and lease, and fall with every cached token."""
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


# --- old loads and rivals ------------------------------------------------------------------------


@given(
    st.lists(st.tuples(st.floats(0.0, 100.0), st.floats(0.01, 10.0)), min_size=1, max_size=12),
    st.floats(0.1, 1000.0),
)
def test_water_finds_its_level(there, tokens) -> None:
    """All tokens go somewhere; whoever gets some is filled to the same level, whoever gets none is
    above it already."""
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
    """1,600 decisions by the same report even out what it says, within chance; without rivals all
    take the least."""
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
    """Workers that are alike but for the age of what is known of them."""
    return tuple(
        replace(worker(n, **fields), age_s=age_s, leased_tokens=leased_tokens, own=False)
        for n, age_s in enumerate(ages_s)
    )


def scores(workers: tuple[Candidate, ...], gateways: int = 1) -> list[float]:
    """What a request costs on each, leases left out."""
    found = predict(ASKED, workers, [0] * len(workers), gateways=gateways)
    assert found is not None
    return [one.score.value for one in found]


def test_idle_workers_are_alike_however_old_their_reports_are() -> None:
    """Where nobody has anything to do, time that has passed is worth nothing."""
    fresh, old = scores(at_ages(0.0, 1.0))
    assert fresh == old


def test_leases_behind_an_old_report_have_been_worked_on_like_what_it_told() -> None:
    """Of two workers with as much leased behind their reports, the one that reported long ago has
    worked it off since, though it had nothing to do then."""
    plenty = round(1.0 / SPEED.step_token_s) * 2
    fresh, old = scores(at_ages(0.0, 1.0, leased_tokens=plenty))
    assert fresh - old == pytest.approx(1.0)
    little = round(0.1 / SPEED.step_token_s)
    fresh, old = scores(at_ages(0.0, 1.0, leased_tokens=little))
    assert 0.0 < fresh - old < 0.1


def test_what_rivals_are_taken_to_have_leased_keeps_workers_busy_too() -> None:
    """With the leases of one gateway known, those of all others are taken to be as many."""
    little = round(0.1 / SPEED.step_token_s)
    (fresh, old), (fresh_beside, old_beside) = (
        scores(at_ages(0.0, 1.0, leased_tokens=little), gateways) for gateways in (1, 30)
    )
    assert fresh_beside - old_beside > fresh - old
    assert fresh_beside - old_beside == pytest.approx(1.0)


@given(st.lists(st.tuples(st.integers(0, 60_000), st.floats(0, 5), st.integers(0, 60_000))))
def test_time_takes_off_no_more_than_has_passed(there) -> None:
    """A score falls by the age of the report at most, and the time that is predicted is never less
    than the request's own."""
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
    """What a state store takes that knows all leases."""
    return min(
        route.offers,
        key=lambda offer: offer.score + offer.score_per_token * leased[offer.worker_id],
    )


def test_a_reservation_takes_the_least_with_the_leases_it_knows() -> None:
    """Offers that were best by an old report give way to others as leases pile up behind it."""
    route = asked(routing_policy("least_cost"), carrying(0, 0, 0, 0))
    leased = dict.fromkeys((offer.worker_id for offer in route.offers), 0)
    for _ in range(40):
        chosen = _least_with(route, leased)
        leased[chosen.worker_id] += ASKED.most_tokens
    assert set(leased.values()) == {10 * ASKED.most_tokens}
    assert _least_with(route, dict.fromkeys(leased, 0)).worker_id == route.worker_id


def test_of_many_workers_the_best_64_are_offered() -> None:
    """What a reservation looks at is bounded, and the chosen one comes first."""
    route = asked(routing_policy("least_loaded"), carrying(*range(500, 300, -1)))
    assert len(route.offers) == 64
    assert route.worker_id == "w-199"


# --- scorers -------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(0, 9000), st.floats(0, 9), st.floats(0, 3)), min_size=1))
def test_scores_are_from_0_to_1(there) -> None:
    """Weights compare scorers, so no scorer may leave its range."""
    workers = [
        replace(worker(n, sent, price=price), age_s=age_s)
        for n, (sent, age_s, price) in enumerate(there)
    ]
    for scorer in SCORERS.values():
        for score in scorer(ASKED, workers, PlacementHistory()):
            assert 0.0 <= score.value <= 1.0
            assert score.per_token >= 0.0


def test_weights_decide_between_scorers() -> None:
    """What is cached and what is carried pull apart; the heavier scorer wins, and says so."""
    for spec, chosen in (("weighted:prefix=3,load", 1), ("weighted:prefix,load=3", 2)):
        policy = routing_policy(spec)
        policy.placed(prompt("a", 64), worker(1))
        route = asked(policy, carrying(0, 700, 0), prompt("a", 64))
        assert route.worker_id == f"w-{chosen}"
        assert "load 0." in route.reason
