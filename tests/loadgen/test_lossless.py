"""The lossless check compares replays without speculation with the run."""

from __future__ import annotations

import asyncio
import io
import re
from dataclasses import replace

import pytest
from rich.console import Console

from draftgate.loadgen.checking.lossless import (
    CONTEXT,
    LosslessCheck,
    check_lossless,
    choose,
    first_difference,
    replay_of,
)
from draftgate.loadgen.planning.plan import Load
from draftgate.loadgen.sending.client import OpenAIClient, open_session
from draftgate.loadgen.sending.driver import run_plan
from draftgate.loadgen.sending.run import run_load
from draftgate.loadgen.sending.target import Target
from tests.loadgen.mock_server import Mock, Script, planned, serving


async def run_and_check(scripts: list[Script], count: int, mock: Mock | None = None, **fields):
    """Run the scripts, then replay `count` of the responses."""
    plan = [planned(i, None, script, **fields) for i, script in enumerate(scripts)]
    async with serving(mock or Mock()) as url, open_session() as session:
        run = await run_plan(OpenAIClient(session, url, "mock"), plan, concurrency=2)
        check = await check_lossless(OpenAIClient(session, url, "mock"), run.records, count)
        again = await check_lossless(OpenAIClient(session, url, "mock"), run.records, count)
    assert check == again
    return check, run


async def test_an_interrupted_check_leaves_the_run(monkeypatch) -> None:
    """Ctrl-C during the replays keeps the records of the run, which then counts as interrupted."""
    original, replaying = Mock._stream, asyncio.Event()

    async def stream(self, request, script, body):
        if body.get("speculation") == {"mode": "off"}:
            replaying.set()
            script = Script(fault="stall")
        return await original(self, request, script, body)

    monkeypatch.setattr(Mock, "_stream", stream)
    load = Load(requests=3, concurrency=3, max_tokens=4)
    async with serving(Mock()) as url:
        console = Console(file=io.StringIO())
        running = asyncio.create_task(run_load(load, Target(url, verify=3), console))
        await replaying.wait()
        running.cancel()
        run, check = await running
    assert [record.verdict for record in run.records] == ["ok"] * 3
    assert run.interrupted
    assert check is None


async def test_equal_texts_pass() -> None:
    """Unchanged responses pass, with a bound on the share that may differ."""
    check, _ = await run_and_check([Script()] * 6, 4)
    assert check == LosslessCheck(4, 4, (), (), 0)
    assert check.passed
    assert check.rate_bound == pytest.approx(1 - 0.05**0.25)


async def test_a_changed_text_fails_and_is_shown() -> None:
    """The check fails and reports the first difference if drafting changed a text."""
    check, run = await run_and_check([Script(lossy=True)], 1)
    (difference,) = check.differences
    assert not check.passed
    assert check.rate_bound is None
    text = run.records[0].texts[0]
    assert (difference.index, difference.choice, difference.at) == (0, 0, len(text) - 1)
    assert difference.run.endswith("? [length]")
    assert difference.replay == difference.run.replace("?", "")


async def test_the_replay_is_the_request_without_speculation() -> None:
    """The replay turns speculation off and uses the server's seed, without other changes."""
    mock = Mock()
    extra = (("temperature", 0.5), ("speculation", {"mode": "ngram", "max_draft_tokens": 4}))
    _, run = await run_and_check([Script()], 1, mock, seed=5)
    first, replay, _ = mock.bodies
    assert replay == first | {"speculation": {"mode": "off"}}
    record = run.records[0]
    record = replace(record, planned=planned(0, None, extra=extra), metrics={"seed": 99})
    body = replay_of(record).request.body("mock")
    assert (body["speculation"], body["temperature"]) == ({"mode": "off"}, 0.5)
    assert body["seed"] == 99


async def test_failed_responses_are_not_chosen_and_failed_replays_fail() -> None:
    """The check does not replay a broken response, and a broken replay fails the check."""
    check, run = await run_and_check([Script(fault="no_done"), Script()], 5)
    assert (check.compared, check.passed) == (1, True)
    broken = planned(1, None, Script(fault="no_done"))
    records = [replace(r, planned=broken) for r in run.records if r.verdict == "ok"]
    async with serving(Mock()) as url, open_session() as session:
        check = await check_lossless(OpenAIClient(session, url, "mock"), records, 1)
        nothing = await check_lossless(OpenAIClient(session, url, "mock"), [], 1)
    assert not check.passed
    assert re.match("no_done: ", check.failed[0][1])
    assert not nothing.passed


async def test_numerics_classes_are_not_mixed() -> None:
    """The check counts a response of another numerics class without comparing the text."""
    _, run = await run_and_check([Script()], 1)
    metrics = run.records[0].metrics | {"numerics_class": "another"}
    async with serving(Mock()) as url, open_session() as session:
        records = [replace(run.records[0], metrics=metrics)]
        check = await check_lossless(OpenAIClient(session, url, "mock"), records, 1)
    assert check == LosslessCheck(0, 0, (), (), 1)
    assert not check.passed


async def test_the_choice_is_seeded_and_prefers_drafts() -> None:
    """A seed chooses the same responses in any order, those with drafts first."""
    _, run = await run_and_check([Script()] * 8, 1)
    records = run.records
    plain = [replace(r, metrics=None) if r.planned.index < 5 else r for r in records]
    assert {r.planned.index for r in choose(plain, 3, 0)} == {5, 6, 7}
    assert choose(records, 4, 1) == choose(records[::-1], 4, 1)
    assert len({tuple(r.planned.index for r in choose(records, 4, s)) for s in range(9)}) > 1


async def test_the_first_difference_is_found() -> None:
    """The check finds the difference in the text, in its length, or in the finish reason."""
    _, run = await run_and_check([Script()], 1)
    record = replace(run.records[0], texts=("a" * 100,), finish_reasons=("stop",))
    assert first_difference(record, record) is None
    changed = first_difference(record, replace(record, texts=("a" * 40 + "b" * 60,)))
    assert changed.at == 40
    assert changed.replay == "a" * CONTEXT + "b" * CONTEXT
    shorter = first_difference(record, replace(record, texts=("a" * 50,)))
    assert (shorter.at, shorter.replay) == (50, "a" * CONTEXT + " [stop]")
    ended = first_difference(record, replace(record, finish_reasons=("length",)))
    assert (ended.at, ended.replay) == (100, "a" * CONTEXT + " [length]")
