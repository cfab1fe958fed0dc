"""Policies of other packages that raise or return nonsense."""

from __future__ import annotations

import importlib
import json
import logging
import math
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
from typer.testing import CliRunner

from draftgate.gateway.cli import app
from draftgate.policies.admission.bounded import Bounded
from draftgate.policies.batching import Slack
from draftgate.policies.costs.step_cost import StepCost
from draftgate.policies.guarded import GUARDS, GuardedOrdering, GuardedSpeculation
from draftgate.policies.ordering.single import fcfs
from draftgate.policies.phases.apart import OneWorker
from draftgate.policies.phases.testing import check_phases
from draftgate.policies.registry import speculation_policy
from draftgate.policies.rescheduling.testing import check_rescheduling
from draftgate.policies.rescheduling.types import NoMoves
from draftgate.policies.routing.scoring import least_loaded
from draftgate.policies.speculation.baselines import Fixed
from draftgate.policies.testing import (
    check_admission,
    check_batching,
    check_ordering,
    check_routing,
    check_speculation,
)
from draftgate.policies.types import DraftCandidate, RequestView, StepView, Ticket, WorkerLoad

COST = StepCost((16, 64, 256), (1e-3, 2e-3, 6e-3), 1e-7, 1e-5, 1e-8)
NONSENSE = ("x", -1, 99.5, math.nan, [99], object())


class Bad:
    """A policy whose methods fail, by chance of an honest policy's or always.

    Attributes:
        share: probability of a failure.
        results: what it returns in case of a failure, or nothing if it raises.
        error: what it raises.
    """

    def __init__(
        self,
        honest: Any,
        share: float = 1.0,
        results: Sequence[Any] = (),
        error: type[BaseException] = ZeroDivisionError,
    ) -> None:
        self._honest, self._share, self._results = honest, share, results
        self._error = error
        self._random = Random(0)

    name = "bad"

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._honest, name)
        if not callable(value):
            return value

        def method(*arguments: Any) -> Any:
            if self._random.random() >= self._share:
                return value(*arguments)
            if not self._results:
                raise self._error(name)
            return self._random.choice(self._results)

        return method


def ignore(_method: str, _error: Exception) -> None:
    """Report nothing."""


CHECKS = {
    "speculation": lambda build: check_speculation(build(Fixed(4))),
    "batching": lambda build: check_batching(build(Slack())),
    "routing": lambda build: check_routing(partial(build, least_loaded())),
    "rescheduling": lambda build: check_rescheduling(build(NoMoves())),
    "phases": lambda build: check_phases(build(OneWorker())),
    "admission": lambda build: check_admission(partial(build, Bounded())),
    "ordering": lambda build: check_ordering(lambda: build(fcfs())),
}


@pytest.mark.parametrize(
    ("results", "error"),
    [((), ZeroDivisionError), ((), SystemExit), (NONSENSE, ZeroDivisionError)],
    ids=["raises", "exits", "nonsense"],
)
@pytest.mark.parametrize("kind", GUARDS)
def test_bad_policies_keep_the_contract(
    kind: str, results: Sequence[Any], error: type[BaseException]
) -> None:
    """A policy whose methods all fail passes the conformance suite of its protocol."""
    CHECKS[kind](lambda honest: GUARDS[kind](Bad(honest, results=results, error=error), ignore))


@pytest.mark.parametrize("kind", GUARDS)
def test_good_policies_are_not_changed(kind: str) -> None:
    """A policy without failures passes the suite, and nothing is reported."""
    reported = list[Exception]()
    CHECKS[kind](lambda honest: GUARDS[kind](honest, lambda _, error: reported.append(error)))
    assert reported == []


@pytest.mark.parametrize("results", [(), (None, *NONSENSE)], ids=["raises", "nonsense"])
def test_queue_that_fails_at_some_time_loses_no_request(results: Sequence[Any]) -> None:
    """Whenever an ordering policy fails, each request is taken exactly once."""
    for seed in range(20):
        random = Random(seed)
        queue = GuardedOrdering(Bad(fcfs(), 0.05, results), ignore)
        taken = []
        for key in range(100):
            queue.push(Ticket(key, float(key), math.inf, work_s=1.0, tenant=str(key % 3)))
            if random.random() < 0.4:
                taken.append(queue.take(float(key)).key)
        assert len(queue) == 100 - len(taken) == queue.work_s
        while (ticket := queue.take(1e3)) is not None:
            taken.append(ticket.key)
        assert sorted(taken) == list(range(100))
        assert (len(queue), queue.work_s, queue.queued_of("1")) == (0, 0.0, 0)


def test_long_drafts_are_limited() -> None:
    """Lengths and plans beyond the limits of the step and the client are cut and reported."""

    class Long(Fixed):
        def draft_lengths(self, step: StepView, cost: StepCost) -> list[int]:
            return [99] * len(step.candidates)

        def decide(self, request: RequestView, load: WorkerLoad) -> Any:
            return replace(super().decide(request, load), max_draft_tokens=99)

    reported = list[str]()
    policy = GuardedSpeculation(Long(4), lambda method, error: reported.append(f"{method} {error}"))
    candidate = DraftCandidate((0.9, 0.8, 0.7))
    step = StepView(2, 100, 2, 5, (candidate, candidate))
    assert list(policy.draft_lengths(step, COST)) == [3, 2]
    load = WorkerLoad(1, 0, 10, 10, 0.0, 0.5, ("ngram",))
    assert policy.decide(RequestView(1, 10, 0.0), load).max_draft_tokens == 64
    capped = RequestView(1, 10, 0.0, max_draft_tokens=2)
    assert policy.decide(capped, load).max_draft_tokens == 2
    assert [line.split()[0] for line in reported] == ["draft_lengths", "decide", "decide"]


def test_negative_lengths_are_reported_as_such() -> None:
    """The report has the shortest and the longest length."""

    class Negative(Fixed):
        def draft_lengths(self, step: StepView, cost: StepCost) -> list[int]:
            return [-5, 2]

    reported = list[str]()
    policy = GuardedSpeculation(Negative(4), lambda _, error: reported.append(str(error)))
    candidate = DraftCandidate((0.9, 0.8, 0.7))
    step = StepView(2, 100, 2, 5, (candidate, candidate))
    assert list(policy.draft_lengths(step, COST)) == [0, 2]
    assert reported == ["lengths from -5 to 2 do not fit the step"]


def install(monkeypatch: pytest.MonkeyPatch, path: Path, name: str, source: str) -> None:
    """Install a package with the speculation policy `NAME`, whose factory is `build`."""
    info = path / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    group = "draftgate.policies.speculation"
    (info / "entry_points.txt").write_text(f"[{group}]\n{name} = {name}:build\n")
    (path / f"{name}.py").write_text(source)
    monkeypatch.syspath_prepend(str(path))
    importlib.invalidate_caches()


@pytest.mark.parametrize(
    ("name", "source", "words"),
    [
        ("raiser", "def build(argument): raise RuntimeError('no idea')", "RuntimeError('no idea')"),
        ("refuser", "def build(argument): raise ValueError('no idea')", "no idea"),
        ("number", "def build(argument): return 42", "no attribute 'name'"),
        ("nothing", "def build(argument): return None", "no attribute 'name'"),
        ("misspelt", "def builds(argument): return None", "no attribute 'build'"),
        ("broken", "1 / 0", "ZeroDivisionError"),
        ("leaver", "import sys; sys.exit(3)", "SystemExit"),
    ],
)
def test_policy_that_cannot_be_built_is_an_invalid_setting(
    name: str, source: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever a package raises at its start, the error names the policy."""
    install(monkeypatch, tmp_path, name, source)
    with pytest.raises(ValueError, match=re.escape(words)) as raised:
        speculation_policy(f"{name}:1")
    assert str(raised.value).startswith(f"speculation policy '{name}:1': ")


def test_installed_policy_is_guarded_and_named_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The log names an installed policy that fails, once for each method and type of error."""
    source = (
        "class build:\n    name = 'crooked'\n    def __init__(self, argument): pass\n"
        "    def decide(self, request, load): raise KeyError('no idea')\n"
    )
    install(monkeypatch, tmp_path, "crooked", source)
    caplog.set_level(logging.WARNING, "draftgate")
    policy = speculation_policy("crooked")
    load = WorkerLoad(1, 0, 10, 10, 0.0, 0.5, ("ngram",))
    plans = [policy.decide(RequestView(1, 10, 0.0), load) for _ in range(3)]
    assert {plan.reason for plan in plans} == {"the policy failed, so the request does not draft"}
    assert {(plan.policy, plan.max_draft_tokens) for plan in plans} == {("crooked", 0)}
    assert math.isinf(policy.least_survival(StepView(1, 1, 1, 1, ()), COST))
    words = "speculation policy crooked failed in"
    messages = [record.getMessage() for record in caplog.records]
    assert messages[0] == f"{words} decide: KeyError('no idea')"
    assert messages[1].startswith(f"{words} least_survival: AttributeError")
    assert len(messages) == 2


@pytest.mark.parametrize(("name", "after", "status"), [("never", 0, 1), ("sometimes", 3, 0)])
def test_simulation_marks_a_policy_that_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, after: int, status: int
) -> None:
    """Row and JSON file say how many calls failed. A policy that never worked gives status 1."""
    source = (
        "from draftgate.policies.speculation.baselines import Off\n"
        "class Failing(Off):\n"
        f"    name, calls = '{name}', 0\n"
        "    def decide(self, request, load):\n"
        "        Failing.calls += 1\n"
        f"        if Failing.calls > {after}: raise SystemExit(0)\n"
        "        return super().decide(request, load)\n"
        "def build(argument): return Failing()\n"
    )
    install(monkeypatch, tmp_path, name, source)
    out = tmp_path / "found.json"
    flags = ["--requests", "8", "--rate", "4", "--speculation", f"off,{name}", "--json", str(out)]
    result = CliRunner().invoke(app, ["simulate", *flags, "--html", str(tmp_path / "found.html")])
    assert result.exit_code == status, result.output
    assert f"{name} (failed)" in " ".join(result.output.split())
    policies = json.loads(out.read_text())["policies"]
    assert "failures" not in policies["off"]
    (failure,) = policies[name]["failures"]
    assert (failure["method"], failure["error"]) == ("decide", "SystemExit(0)")
    assert failure["calls"] - failure["failed"] == after
    assert "SystemExit(0)" in (tmp_path / "found.html").read_text()
