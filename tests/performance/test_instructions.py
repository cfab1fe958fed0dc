"""The instructions of requests, compared with the committed baseline."""

from __future__ import annotations

import sys

import pytest

from tests.performance.instructions import COMMAND, TOLERANCE, measure, missing, read_baseline

BASELINE = read_baseline()
RECORDED = BASELINE["instructions"]
assert isinstance(RECORDED, dict)


@pytest.fixture(scope="module")
def counts() -> dict[str, int]:
    """Return the instructions of each kind of request."""
    if reason := missing():
        pytest.skip(reason)
    # Another build of Python needs other instructions for the same code.
    if sys.version != BASELINE["python"]:
        pytest.skip(f"the baseline is of Python {BASELINE['python']}")
    return measure()


@pytest.mark.parametrize("request_kind", RECORDED)
def test_request_takes_as_many_instructions_as_recorded(
    request_kind: str, counts: dict[str, int]
) -> None:
    """The instructions of a request differ by at most 5% from the committed baseline."""
    count, recorded = counts[request_kind], RECORDED[request_kind]
    assert count <= recorded * (1 + TOLERANCE), (
        f"{count:,} instructions instead of {recorded:,}: make the change cheaper, or justify its"
        f" cost in the commit and record it with `{COMMAND}`"
    )
    assert count >= recorded * (1 - TOLERANCE), (
        f"{count:,} instructions instead of {recorded:,}: record the gain with `{COMMAND}`"
    )
