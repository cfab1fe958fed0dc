"""Failover policy: which requests resume after a loss, and when a request is given up."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftgate.policies.resilience.failover import MOST_RESUMES, GivenUp, Loss, given_up


def losses(*new_tokens: int) -> list[Loss]:
    return [Loss(f"w-{index}", tokens) for index, tokens in enumerate(new_tokens)]


def test_first_loss_resumes_on_any_worker() -> None:
    """After one loss, a request may use any worker, including the last worker."""
    for tokens in (0, 9):
        for workers in (0, 1, 7):
            assert given_up(losses(tokens), MOST_RESUMES, workers) is None


def test_suspect_request_never_goes_to_the_last_worker() -> None:
    """A request that loses two workers without a token in between is a suspect, until it gains a
    token."""
    assert given_up(losses(9, 0), MOST_RESUMES, 1) is GivenUp.LAST_WORKER
    assert given_up(losses(9, 0), MOST_RESUMES, 2) is None
    assert given_up(losses(0, 1), MOST_RESUMES, 1) is None


@given(st.lists(st.integers(0, 3), min_size=1, max_size=9), st.integers(0, 9), st.integers(0, 9))
def test_request_is_given_up_after_the_most_resumes(
    new_tokens: list[int], most_resumes: int, workers: int
) -> None:
    """The limit of resumes does not depend on progress or on the number of workers."""
    why = given_up(losses(*new_tokens), most_resumes, workers)
    assert (why is GivenUp.EXHAUSTED) == (len(new_tokens) > most_resumes)


@given(st.integers(1, 12), st.integers(0, 9), st.integers(0, 5))
def test_poison_request_takes_few_workers_and_never_the_last_of_three(
    workers: int, most_resumes: int, first_tokens: int
) -> None:
    """A request that breaks every worker at the same position takes at most `1 + most_resumes`."""
    left, lost = workers, losses()
    while left:
        lost.append(Loss(f"w-{len(lost)}", first_tokens if not lost else 0))
        left -= 1
        if given_up(lost, most_resumes, left) is not None:
            break
    assert workers - left <= 1 + most_resumes
    assert left >= 1 or workers <= 2


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_bystander_with_progress_is_never_suspect(workers: int) -> None:
    """Only the number of losses counts for a request with progress between them."""
    assert given_up(losses(1, 1), MOST_RESUMES, workers) is None
