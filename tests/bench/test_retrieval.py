"""The measurements of `draftgate bench retrieval`: ranks, intervals, word search and costs."""

from __future__ import annotations

import numpy as np
import pytest

from bench.engine.retrieval import (
    EngineEncoder,
    bm25_scores,
    kept_share,
    measure_costs,
    random_scores,
    ranks,
    recall,
    words,
)
from draftgate.backends.checkpoints import (
    SHIPPED_DOCUMENTS_ID,
    SHIPPED_QUERIES_ID,
    SHIPPED_TOWERS,
)
from draftgate.loadgen.planning.pairs import CODE, Pair

PAIRS = [
    Pair("read the configuration", "def readConfiguration(path): return path", CODE),
    Pair("close a socket", "def close_socket(sock): sock.shutdown()", CODE),
    Pair("sum of numbers", "def total(values): return add(values)", CODE),
]


def test_ranks_count_passages_with_at_least_the_score_of_the_right_one() -> None:
    """Constant scores find nothing, so that a broken encoder cannot look good."""
    scores = np.array([[3, 2, 1], [9, 8, 7], [0, 0, 0]], np.float32)
    assert ranks(scores).tolist() == [0, 1, 2]
    assert recall(ranks(scores)) == {"1": 0.3333, "5": 1.0, "20": 1.0}
    assert ranks(np.zeros((30, 30), np.float32)).tolist() == [29] * 30


def test_kept_share_has_a_paired_interval() -> None:
    """The share is a ratio of hits, inside its interval, and exactly 1 for equal ranks."""
    rng = np.random.default_rng(1)
    reference = rng.integers(10, size=400)
    worse = np.where(rng.random(400) < 0.1, 9, reference)
    found = kept_share(worse, reference)
    assert found["low"] < found["share"] < found["high"] < 1.0
    assert kept_share(reference, reference) == {"share": 1.0, "low": 1.0, "high": 1.0}


def test_word_search_divides_identifiers() -> None:
    """BM25 sees the words of camel and snake case."""
    assert words("readConfigFile(max_len=12)") == ["read", "config", "file", "max", "len", "12"]
    assert ranks(bm25_scores(PAIRS)).tolist()[:2] == [0, 0]


def test_random_vectors_find_by_chance() -> None:
    """Recall at 5 of a thousand passages is about 0.005."""
    assert recall(ranks(random_scores(PAIRS * 300)))["5"] == pytest.approx(0.0056, abs=0.007)


def test_query_tower_costs_at_most_a_fifth_of_the_multiply_adds() -> None:
    """The count of multiply-adds is that of the shapes, and every encoder is timed."""
    encoders = {name: EngineEncoder(path) for name, path in SHIPPED_TOWERS.items()}
    costs = measure_costs([pair.question for pair in PAIRS], encoders)
    large, small = costs[SHIPPED_DOCUMENTS_ID], costs[SHIPPED_QUERIES_ID]
    assert small["multiply_adds"] <= large["multiply_adds"] / 5
    assert small["query_tokens"] == large["query_tokens"]
    assert min(large["mean_us"], small["mean_us"]) > 0
