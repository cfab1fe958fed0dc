"""The measurements of `bench.engine.retrieval`: ranks, intervals and the search by words."""

from __future__ import annotations

import numpy as np

from bench.engine.retrieval import bm25_scores, kept_share, ranks, recall, words
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
    found = recall(ranks(scores))
    assert [each["share"] for each in found.values()] == [0.3333, 1.0, 1.0]
    assert ranks(np.zeros((30, 30), np.float32)).tolist() == [29] * 30


def test_intervals_contain_the_share_and_narrow_with_more_questions() -> None:
    """The interval of a share is that of a binomial distribution, up to the resampling."""
    few, many = (recall(np.arange(n) % 10)["5"] for n in (100, 1600))
    for found, half in ((few, 0.098), (many, 0.0245)):
        assert found["share"] == 0.5
        assert abs(found["share"] - found["low"] - half) < half / 8
        assert abs(found["high"] - found["share"] - half) < half / 8


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
