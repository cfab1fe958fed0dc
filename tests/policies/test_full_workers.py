"""The record of searches without success equals a search of all workers."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from draftgate.policies.full_workers import MOST_KINDS, FullWorkers

WORKERS = 4
REPORT = st.tuples(st.just("report"), st.integers(0, WORKERS - 1), st.integers(-1, 9))
SEARCH = st.tuples(st.just("search"), st.integers(0, MOST_KINDS), st.integers(0, 9))
CLEAR = st.tuples(st.just("clear"), st.just(0), st.just(0))


class Pool:
    """Workers that have capacity for prompts up to a length, and requests that search them."""

    def __init__(self) -> None:
        self.full = FullWorkers[int]()
        self.longest = [-1] * WORKERS
        self.compared = 0

    def report(self, worker: int, longest: int) -> None:
        """Change the capacity of a worker."""
        self.longest[worker] = longest
        self.full.mark(worker)

    def search(self, kind: int, prompt_tokens: int) -> list[int]:
        """Return the workers with capacity, as the gateway searches them."""
        candidates = self.full.candidates(kind, prompt_tokens)
        some = range(WORKERS) if candidates is None else candidates
        self.compared += len(some)
        found = [one for one in some if prompt_tokens <= self.longest[one]]
        if not found:
            longest = max((self.longest[one] for one in some), default=-1)
            self.full.record(kind, longest, searched_all=candidates is None)
        return found


@given(st.lists(st.one_of(REPORT, SEARCH, CLEAR), max_size=60))
@example([("search", 0, 5), ("report", 1, 4), ("search", 0, 5), ("search", 0, 3)])
@example([("search", 0, 5), ("report", 1, 9), ("search", 0, 5), ("search", 1, 5)])
def test_searches_find_the_same_workers_as_searches_of_all(
    events: list[tuple[str, int, int]],
) -> None:
    """A search finds exactly the workers with capacity, whatever changed before."""
    pool = Pool()
    for what, number, tokens in events:
        if what == "report":
            pool.report(number, tokens)
        elif what == "clear":
            pool.full.clear()
        else:
            expected = [one for one in range(WORKERS) if tokens <= pool.longest[one]]
            assert sorted(pool.search(number, tokens)) == expected


def test_a_search_compares_only_workers_that_have_changed() -> None:
    """While a request waits, each report of a worker costs one comparison."""
    pool = Pool()
    pool.search(0, 5)
    before = pool.compared
    for number in range(100):
        pool.report(number % WORKERS, 4)
        assert not pool.search(0, 5)
    assert pool.compared - before == 100


def test_a_shorter_prompt_may_fit_where_a_longer_one_did_not() -> None:
    """A request whose prompt fits into a worker that has not changed searches all workers."""
    pool = Pool()
    pool.report(2, 4)
    assert not pool.search(0, 5)
    assert pool.full.candidates(0, 4) is None
    assert pool.search(0, 4) == [2]


def test_kinds_of_requests_are_limited() -> None:
    """Requests of many kinds keep a bounded number of searches."""
    pool = Pool()
    for kind in range(3 * MOST_KINDS):
        pool.search(kind, 5)
    kept = [kind for kind in range(3 * MOST_KINDS) if pool.full.candidates(kind, 5) is not None]
    assert 0 < len(kept) <= MOST_KINDS
