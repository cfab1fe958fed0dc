"""Tests of plans, of the passage index, and of searches that execute a plan."""

from __future__ import annotations

import json
import math
import struct
from random import Random

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftgate.loadgen.planning.pairs import CODE, DOCUMENTATION, Pair
from draftgate.loadgen.sending.client import OpenAIClient, open_session
from draftgate.loadgen.sending.passage_index import PassageIndex, build_index
from draftgate.loadgen.workloads.rag_plan import (
    PLAN_SCHEMA,
    QUERY_CHARACTERS,
    PlanStep,
    parse_plan,
    response_format,
)
from draftgate.loadgen.workloads.rag_search import FoundPassage, PassageSearch, Searches
from tests.loadgen.mock_server import Mock, serving, vector_of


def step(source: str = CODE, query: str = "a", uses=()) -> dict:
    return {"source": source, "query": query, "uses": list(uses)}


def plan_of(*steps: dict, **more) -> str:
    return json.dumps({"steps": steps, **more})


def packed(*numbers: float) -> bytes:
    return struct.pack(f"<{len(numbers)}f", *numbers)


def places(found) -> list[int]:
    return [one.place for one in found]


def pairs_of(*passages: str, sources=()) -> list[Pair]:
    """Return pairs, of documentation unless the sources are given."""
    sources = sources or [DOCUMENTATION] * len(passages)
    return [
        Pair(f"question {n}", *one) for n, one in enumerate(zip(passages, sources, strict=True))
    ]


@pytest.mark.parametrize(
    ("text", "steps"),
    [
        (plan_of(step(query=" a b ")), [PlanStep(CODE, "a b")]),
        (
            plan_of(step(DOCUMENTATION), step(uses=[1]), step(uses=[1, 2])),
            [PlanStep(DOCUMENTATION, "a"), PlanStep(CODE, "a", (1,)), PlanStep(CODE, "a", (1, 2))],
        ),
        (plan_of(step(), more=1), [PlanStep(CODE, "a")]),
        (plan_of({"source": CODE, "query": "a"}), [PlanStep(CODE, "a")]),
        (plan_of(step(query="x" * 99)), [PlanStep(CODE, "x" * QUERY_CHARACTERS)]),
        (plan_of(*[step()] * 4), None),
        (plan_of(step(uses=[1])), None),
        (plan_of(step(), step(uses=[0])), None),
        (plan_of(step(), step(uses=[3])), None),
        (plan_of(step(query=" ")), None),
        (plan_of(step("wiki")), None),
        (plan_of(step(query=1)), None),
        (plan_of(), None),
        (plan_of(step())[:-9], None),
        ('["a"]', None),
        ("The plan is to search.", None),
        ("", None),
    ],
)
def test_only_valid_plans_have_steps(text: str, steps) -> None:
    """A plan that is cut, empty, too long, or uses a later step is not valid."""
    assert parse_plan(text) == (None if steps is None else tuple(steps))


def test_a_next_step_uses_earlier_steps_and_may_be_omitted() -> None:
    """An agent's plan has at most one step, and may be empty."""
    assert parse_plan(plan_of(step(uses=[2])), 2) == (PlanStep(CODE, "a", (2,)),)
    assert parse_plan(plan_of(), 1) == ()
    assert parse_plan(plan_of(step(uses=[2])), 1) is None
    assert parse_plan(plan_of(step(), step()), 0) is None


STEPS = st.fixed_dictionaries(
    {
        "source": st.sampled_from([CODE, DOCUMENTATION, "wiki"]),
        "query": st.text("ab é", max_size=QUERY_CHARACTERS).filter(lambda text: not text.isspace()),
        "uses": st.lists(st.integers(0, 3), max_size=2),
    }
)


@given(st.lists(STEPS, max_size=4), st.sampled_from([None, 0, 1, 2]))
def test_the_schema_admits_exactly_the_valid_plans(steps: list[dict], earlier) -> None:
    """A validator accepts the plans that the parser accepts, for whole plans and single steps."""
    schema = response_format(earlier)["json_schema"]["schema"]
    valid = parse_plan(plan_of(*steps), earlier) is not None
    assert jsonschema.Draft202012Validator(schema).is_valid({"steps": steps}) == valid


def test_the_shipped_schema_is_the_form_of_whole_plans() -> None:
    """The file is a valid schema, and requests contain it unchanged."""
    jsonschema.Draft202012Validator.check_schema(PLAN_SCHEMA)
    assert response_format()["json_schema"]["schema"] == PLAN_SCHEMA


@given(st.lists(STEPS, max_size=3))
def test_every_step_of_a_valid_plan_runs_once(steps: list[dict]) -> None:
    """Each retrieval runs only steps whose uses have run, and no valid plan stays incomplete."""
    plan = parse_plan(plan_of(*steps)) or ()
    index = words_index("a b", "b", sources=[CODE, DOCUMENTATION])
    searches, done = Searches(index, "a", 2), list[int]()
    searches.add(plan)
    while ready := searches.ready():
        for number in (search.number for search in ready):
            assert number == 0 or set(plan[number - 1].uses) <= set(done)
        done += [search.number for search in ready]
        searches.run([packed(*vector_of(search.text)) for search in ready])
    assert sorted(done) == list(range(len(plan) + 1))
    assert set(searches.best()) <= {0, 1}


def test_the_index_finds_the_nearest_by_cosine() -> None:
    """The result equals a brute-force search."""
    rng = Random(3)
    rows = [[rng.gauss(0, 1) for _ in range(8)] for _ in range(40)]
    passages = pairs_of(*(f"passage {n}" for n in range(40)))
    index = PassageIndex(passages, [packed(*row) for row in rows])

    def cosine(a, b) -> float:
        return sum(x * y for x, y in zip(a, b, strict=True)) / math.hypot(*a) / math.hypot(*b)

    for _ in range(20):
        query = [rng.gauss(0, 5) for _ in range(8)]
        wanted = sorted(range(40), key=lambda n: -cosine(rows[n], query))[:5]
        found = index.nearest(packed(*query), 5)
        assert places(found) == wanted
        assert found[0].score == pytest.approx(cosine(rows[wanted[0]], query), abs=1e-6)


def test_of_equal_passages_the_more_popular_comes_first() -> None:
    """The index keeps the order of the collection for ties and for a zero vector."""
    index = PassageIndex(pairs_of("a", "b", "c"), [packed(1, 0), packed(0, 1), packed(0, 3)])
    assert places(index.nearest(packed(0, 2), 3)) == [1, 2, 0]
    assert places(index.nearest(packed(0, 0), 2)) == [0, 1]


def test_passages_are_found_by_rare_words() -> None:
    """The passage that shares the rarest words is first.

    A word in all passages has no weight, and the score is a share of the known words.
    """
    index = PassageIndex(pairs_of("the cat sat", "the dog ran", "the dog slept"), [packed(1.0)] * 3)
    assert index.by_words("The CAT?", 1) == [FoundPassage(0, 1.0)]
    assert places(index.by_words("the dog slept", 3)) == [2, 1, 0]
    dog, slept = math.log(3 / 2), math.log(3)
    scores = [one.score for one in index.by_words("the unheard dog slept", 3)]
    assert scores == pytest.approx([1.0, dog / (dog + slept), 0.0])
    assert places(index.by_words("the unheard", 3)) == [0, 1, 2]


def test_a_search_may_be_limited_to_a_source() -> None:
    """Both kinds of search return only passages of the source, even fewer than requested."""
    sources = [CODE, DOCUMENTATION, CODE]
    vectors = [packed(0, 1), packed(1, 0), packed(1, 1)]
    index = PassageIndex(pairs_of("cat", "cat dog", "dog", sources=sources), vectors)
    assert places(index.nearest(packed(1, 0), 3, CODE)) == [2, 0]
    assert places(index.by_words("dog", 3, DOCUMENTATION)) == [1]
    assert places(index.by_words("dog", 3, CODE)) == [2, 0]


@pytest.mark.parametrize("passages", ["", "a", "abc"])
def test_an_index_needs_a_vector_for_each_passage(passages: str) -> None:
    """The index rejects any other number of vectors."""
    with pytest.raises(ValueError, match="vectors"):
        PassageIndex(pairs_of(*passages), [packed(1.0)] * 2)


async def test_an_index_is_built_once_per_model() -> None:
    """A second index of the same passages and model sends no request."""
    mock, passages = Mock(), pairs_of(*(f"passage {n}" for n in range(40)))
    fields = (("model", "documents"), ("input_type", "document"))
    async with serving(mock) as url, open_session() as session:
        client = OpenAIClient(session, url, "mock")
        index = await build_index(client, passages)
        requests = len(mock.bodies)
        assert await build_index(client, passages) is index
        assert len(mock.bodies) == requests
        other = await build_index(client, passages[1:], fields)
        assert await build_index(client, passages[1:]) is not other
    assert places(index.nearest(packed(*vector_of("passage 33")), 1)) == [33]
    assert len(other.pairs) == 39
    assert "input_type" not in mock.bodies[0]
    assert [mock.bodies[requests][name] for name in ("model", "input_type")] == [
        "documents",
        "document",
    ]


def words_index(*passages: str, sources=()) -> PassageIndex:
    """Return an index of the mock server's vectors."""
    vectors = [packed(*vector_of(passage)) for passage in passages]
    return PassageIndex(pairs_of(*passages, sources=sources), vectors)


def test_steps_run_after_the_steps_that_they_use() -> None:
    """A query is extended by the first line of the best passage that an earlier step found."""
    index = words_index("def cat():\n    meow", "the cat sleeps", "dog", sources=[CODE, *["x"] * 2])
    searches = Searches(index, "which animal", 2)
    searches.add([PlanStep(CODE, "meow"), PlanStep("x", "sleeps", (1,)), PlanStep("x", "dog")])
    ready = [
        PassageSearch(0, "which animal"),
        PassageSearch(1, "meow", CODE),
        PassageSearch(3, "dog", "x"),
    ]
    assert searches.ready() == ready
    searches.run([packed(*vector_of(search.text)) for search in ready])
    assert searches.ready() == [PassageSearch(2, "sleeps def cat():", "x")]
    searches.run([packed(*vector_of("sleeps def cat():"))])
    assert searches.ready() == []


def test_passages_are_ranked_by_their_best_score_in_any_search() -> None:
    """Repeated searches add nothing, and the question precedes steps of equal scores."""
    index = words_index("alpha", "alpha beta", "beta gamma", "beta")
    searches = Searches(index, "alpha", 3)
    searches.run([packed(*vector_of("alpha"))])
    assert searches.best() == [0, 1, 2]
    for _ in range(3):
        searches.add([PlanStep(DOCUMENTATION, "gamma")])
        searches.run([packed(*vector_of("gamma"))])
    assert searches.best() == [0, 1, 2]
    searches.add([PlanStep(DOCUMENTATION, "beta gamma")])
    searches.run([packed(*vector_of("beta gamma"))])
    assert searches.best() == [0, 2, 1]


def test_words_replace_missing_vectors() -> None:
    """Searches without vectors compare words, in the source of each step."""
    index = words_index("alpha one", "beta two", "beta three", sources=[CODE, CODE, "x"])
    searches = Searches(index, "alpha", 1)
    searches.add([PlanStep("x", "beta")])
    searches.run(())
    assert searches.best() == [0]
    assert searches.ready() == []
    both = Searches(index, "unknown", 2)
    both.add([PlanStep("x", "beta")])
    both.run(())
    assert both.best() == [2, 0]
