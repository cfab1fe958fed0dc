"""Tests of `draftgate bench speculation`, with mock servers and known runs."""

from __future__ import annotations

import json
import os
from contextlib import AsyncExitStack
from dataclasses import replace
from math import exp, log

import pytest

from bench.gateway.speculation import (
    FORMAT,
    Contender,
    Measurement,
    contenders_of,
    read_runs,
    write,
)
from bench.gateway.speculation_cells import (
    BEFORE_LOOPS,
    LOOPS,
    OUTPUTS,
    SAMPLED,
    TEXTS,
    Cell,
    Prompt,
    all_cells,
    greedy_pools,
    held_out_prompts,
    requests_of,
)
from bench.gateway.speculation_report import Run, Turns, mean_ratio, summary, table
from bench.harness.loops import loop_start
from bench.harness.servers import Server
from tests.loadgen.mock_server import Mock, serving

CELL = Cell(SAMPLED, "code", 2)
POLICIES = ["off", "fixed:2", "auto"]


class LossyMock(Mock):
    """A server whose drafts change the text."""

    async def _stream(self, request, script, body):
        return await super()._stream(request, replace(script, lossy=True), body)


def run(number: int, policy: str, rate: float, cell: Cell = CELL) -> Run:
    """Return a run of 100 tokens with a rate in tokens per second."""
    seconds = 100 / rate
    return Run(number, *cell, policy, 100, seconds, seconds, 0.1, 1.0, 5, 20, 10, 1, 2, None, 0)


def head(**fields) -> dict:
    """Return the settings of a measurement."""
    values = {"format": FORMAT, "policies": POLICIES, "proposer": None, "prompts": 2, "seed": 0}
    return {**values, "commit": "c", "device": "d", **fields}


async def contenders(stack: AsyncExitStack, mocks: dict[str, Mock]) -> list[Contender]:
    """Return contenders whose servers are mocks in this process."""
    servers = {}
    for policy, mock in mocks.items():
        url = await stack.enter_async_context(serving(mock))
        servers[policy] = Server(os.getpid(), int(url.rpartition(":")[2]))
    return await stack.enter_async_context(contenders_of(servers))


def test_a_loop_starts_at_the_first_repeated_gram() -> None:
    """The loop starts where 8-grams begin to repeat, and an output without a loop has no start."""
    assert loop_start([*range(20), *range(12, 20), *range(12, 20)]) == 20
    assert loop_start("abcdefghijklmnop" + "x") == 17


@pytest.mark.parametrize("text", TEXTS)
def test_prompts_of_each_text_are_distinct_and_repeatable(text) -> None:
    """The same seed gives the same non-empty prompts, which all differ."""
    prompts = held_out_prompts(text, 5, seed=3)
    assert prompts == held_out_prompts(text, 5, seed=3)
    assert len(set(prompts)) == 5
    assert all(len(prompt) > 80 for prompt in prompts)


def test_greedy_outputs_are_cut_at_their_loop_or_kept_with_it() -> None:
    """Long beginnings are cut at the loop, and outputs with an early loop are kept as a whole."""
    pools = greedy_pools(["early", "late", "never"], [10, 40, 96])
    assert pools[BEFORE_LOOPS] == [Prompt("late", 40), Prompt("never", 64)]
    assert pools[LOOPS] == [Prompt("early", 96), Prompt("late", 96)]


def test_cells_without_prompts_are_omitted() -> None:
    """A kind of output that no prompt has is not measured."""
    pools = {(outputs, "code"): [Prompt("x")] for outputs in OUTPUTS} | {(LOOPS, "code"): []}
    assert {cell.outputs for cell in all_cells(OUTPUTS, ["code"], [1, 4], pools)} == {
        SAMPLED,
        BEFORE_LOOPS,
    }


def test_every_stream_has_a_request() -> None:
    """A cell has at least one request per stream, and repeats prompts with other seeds."""
    for streams in (1, 4, 16, 64, 100):
        requests = requests_of(Cell(SAMPLED, "code", streams), [Prompt("a"), Prompt("b")])
        assert len(requests) >= max(streams, 8)
        assert len({one.request.seed for one in requests}) == len(requests)


async def test_policies_run_the_same_requests_in_rotating_order() -> None:
    """Each turn sends the same requests to all servers, and each round begins with another one."""
    mocks = {policy: Mock() for policy in POLICIES}
    async with AsyncExitStack() as stack:
        found = await contenders(stack, mocks)
        measured = Measurement(found, {(SAMPLED, "code"): [Prompt("a", 8), Prompt("b", 8)]}, [])
        turns = [await measured.run_turn(CELL, number) for number in range(3)]
    assert [[one.policy for one in turn] for turn in turns] == [
        ["off", "fixed:2", "auto"],
        ["fixed:2", "auto", "off"],
        ["auto", "off", "fixed:2"],
    ]
    sent = [sorted((b["prompt"], b["seed"]) for b in mock.bodies) for mock in mocks.values()]
    assert sent[0] == sent[1] == sent[2]
    assert all(body["ignore_eos"] for mock in mocks.values() for body in mock.bodies)
    assert {one.different for turn in turns for one in turn} == {0}
    assert all(one.tokens == 8 * 12 and one.drafted == 8 * 12 for turn in turns for one in turn)
    assert measured.is_measured(CELL, 2)
    assert not measured.is_measured(CELL, 3)


async def test_texts_that_differ_between_policies_are_counted() -> None:
    """Every text of a policy that differs from the first text of its request counts."""
    async with AsyncExitStack() as stack:
        found = await contenders(stack, {"off": Mock(), "auto": LossyMock()})
        measured = Measurement(found, {(SAMPLED, "code"): [Prompt("a", 8)]}, [])
        off, auto = await measured.run_turn(CELL, 0)
    assert (off.different, auto.different) == (0, 12)


async def test_a_failed_request_ends_the_measurement() -> None:
    """A server that refuses a request raises an error instead of a wrong rate."""

    class Refusing(Mock):
        async def _stream(self, request, script, body):
            request.transport.abort()

    async with AsyncExitStack() as stack:
        found = await contenders(stack, {"auto": Refusing()})
        measured = Measurement(found, {(SAMPLED, "code"): [Prompt("a", 8)]}, [])
        with pytest.raises(RuntimeError, match="a request failed"):
            await measured.run_turn(CELL, 0)
    assert not measured.runs


def test_ratios_are_paired_and_have_students_interval() -> None:
    """The interval of the mean logarithm has Student's quantile, here 4.30 for three rounds."""
    found = mean_ratio([log(1.1), log(1.2), log(1.3)])
    assert found.mean == pytest.approx((1.1 * 1.2 * 1.3) ** (1 / 3))
    half = 4.30 * 0.0835 / 3**0.5
    assert log(found.high / found.mean) == pytest.approx(half, rel=0.05)
    assert found.low * found.high == pytest.approx(found.mean**2)


def test_summary_compares_auto_with_the_best_policy_of_each_cell() -> None:
    """A cell whose upper bound is below 0.99 of the best other policy is listed."""
    other = CELL._replace(streams=8)
    rates = {CELL: {"off": 100.0, "fixed:2": 150.0, "auto": 160.0}}
    rates[other] = {"off": 100.0, "fixed:2": 80.0, "auto": 90.0}
    runs = [
        run(number, policy, rate * exp(0.001 * number * (policy == "auto")), cell)
        for cell, by_policy in rates.items()
        for number in range(3)
        for policy, rate in by_policy.items()
    ]
    unfinished = [run(3, "off", 1.0)]
    result = summary(Turns(runs + unfinished, POLICIES))
    first, second = result["cells"]
    assert (first["best_other"], second["best_other"]) == ("fixed:2", "off")
    assert first["to_best"][0] == pytest.approx(160 / 150, rel=2e-3)
    assert first["rounds"] == 3
    assert result["cells_below_best"] == [list(other)]
    over = result["over_cells"]["all"]["tokens_per_s"]["off"]
    assert over[0] == pytest.approx((1.6 * 0.9) ** 0.5, rel=2e-3)
    lines = list(table(result, POLICIES))
    assert any(line.startswith("| sampled | code | 8 | 100 | 80 | 90 |") for line in lines)


def test_an_interrupted_measurement_continues_from_its_file(tmp_path) -> None:
    """The file restores all runs, and another commit, device or policy is refused."""
    path = tmp_path / "runs.json"
    runs = [run(0, policy, 100.0) for policy in POLICIES]
    write(path, head(), runs)
    assert read_runs(path, head()) == runs
    assert json.loads(path.read_text())["cells"][0]["rounds"] == 1
    with pytest.raises(SystemExit, match="commit"):
        read_runs(path, head(commit="other"))
    assert read_runs(tmp_path / "none.json", head()) == []
