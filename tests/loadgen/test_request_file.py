"""Tests of workloads from a file of requests."""

from __future__ import annotations

import pytest

from draftgate.loadgen.workloads import make_workload
from draftgate.loadgen.workloads.request_file import MAX_TOKENS
from tests.loadgen.workload_requests import SLO, settings_of


def test_a_file_of_requests_starts_again_after_its_last(tmp_path) -> None:
    """Requests repeat from the first line, each with its own seed and the run's SLO."""
    path = tmp_path / "requests.jsonl"
    path.write_text('{"prompt": "a"}\n{"prompt": "b", "max_tokens": 5, "stop": ["x"]}\n')
    workload = make_workload(str(path), settings_of(7, slo=SLO))
    requests = [workload.request(index) for index in range(3)]
    assert [one.prompt for one in requests] == ["a", "b", "a"]
    assert [one.max_tokens for one in requests] == [MAX_TOKENS, 5, MAX_TOKENS]
    assert [one.seed for one in requests] == [7, 8, 9]
    assert requests[1].extra == (("stop", ["x"]),)
    assert {one.slo for one in requests} == {SLO}
    limited = make_workload(str(path), settings_of(7, max_tokens=2))
    assert {limited.request(index).max_tokens for index in range(2)} == {2}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: "),
        ("[]", "line 2: "),
        ("{}", "line 2: expected either `prompt` or `messages`"),
        ('{"prompt": "a", "messages": []}', "line 2: expected either"),
        ('{"messages": [{"role": "user", "content": 1}]}', "line 2: .*content"),
        ('{"messages": [{"role": "user", "content": "a", "name": "b"}]}', "line 2: .*name"),
        ('{"prompt": "a", "max_tokens": 0}', "line 2: max_tokens must be positive"),
        ('{"prompt": "a", "stream": false}', "line 2: the load generator sets stream itself"),
    ],
)
def test_a_malformed_request_names_its_line(tmp_path, line: str, message: str) -> None:
    """The workload rejects a malformed line with an error that names file, line and fault."""
    path = tmp_path / "requests.jsonl"
    path.write_text(f'{{"prompt": "a"}}\n{line}\n')
    with pytest.raises(ValueError, match=message) as refused:
        make_workload(str(path), settings_of(0))
    assert str(path) in str(refused.value)


def test_a_file_without_requests_is_refused(tmp_path) -> None:
    """The workload rejects a file without requests."""
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(ValueError, match="has no requests"):
        make_workload(str(tmp_path / "empty.jsonl"), settings_of(0))
