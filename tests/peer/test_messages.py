"""What travels between nodes: whole, on any machine, and nothing else is taken for it."""

from __future__ import annotations

import sys
from array import array

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftgate.backends import token_ids
from draftgate.backends.peer.messages import (
    AskTokenizer,
    Cancel,
    Command,
    Report,
    SetPace,
    Submit,
    TokenizerFiles,
    Update,
)
from draftgate.backends.peer.numbers import Numbers
from draftgate.backends.token_ids import compact, from_bytes, to_bytes
from draftgate.backends.types import (
    Delta,
    FinishReason,
    GenerationRequest,
    GrammarKind,
    GrammarSpec,
    Pace,
    Phases,
    ResumedChoice,
    SamplingParams,
    SpeculationOutcome,
    StepTrace,
    Task,
    TokenLogprob,
)
from draftgate.backends.wire import Codec
from draftgate.policies.types import (
    ServiceLevel,
    SpeculationMode,
    SpeculationPlan,
    WorkerLoad,
    WorkerSpeed,
)
from tests.peer.harness import a_welcome

PLAN = SpeculationPlan("auto", SpeculationMode.AUTO, "ngram", 4, "because", 0.1)
FULL = GenerationRequest(
    "b",
    compact([3, 1 << 40]),
    SamplingParams(5, (1 << 64) - 1, 0.8, logit_bias=((7, -1.5),), stop=("x",)),
    PLAN,
    n=2,
    tenant="t",
    grammar=GrammarSpec(GrammarKind.REGEX, "a+"),
    resumed=(ResumedChoice(1, (8, 9)),),
    service=ServiceLevel(1.5, 0.0125, -(1 << 31)),
    traced=True,
    block_hashes=(b"\x00" * 16, b"\xff" * 16),
    trace_context=(("traceparent", "00-1-2-01"),),
)
PLAIN = GenerationRequest("c", compact([]), SamplingParams(0, 0), PLAN, task=Task.EMBED)
OUTCOME = SpeculationOutcome(3, 9, 4, (1, 1, 0, 1))
STEP = StepTrace(2, "ngram", 3, (5, 9), 1, (0.75, 0.5), 0.125)
PHASES = Phases(1.0, 2.0, ((3.0, 16), (4.0, 5)), 4.0, recorded=True)
LOGPROBS = (TokenLogprob(5, -0.5, ((5, -0.5), (6, -1.5))),)
DELTAS = [
    (3, Delta(1, (5, 6), "tëxt", LOGPROBS, FinishReason.STOP, OUTCOME, 16, (STEP,), PHASES)),
    (1 << 40, Delta(0, (), "", finish_reason=FinishReason.STOP, embedding=b"\x00\x80\xff")),
]
LOAD = WorkerLoad(
    *(1, 2, 3, 4, 0.25, 0.7, ("ngram", "draft_model"), 0.05),
    *(64, 900, 512, 16, WorkerSpeed(0.02, 1e-4, 3e-4), 5),
)
COMMANDS = [Submit(1, FULL), Submit(2, PLAIN), Cancel(1), SetPace(1, Pace.PAUSED), AskTokenizer()]
REPORTS = [
    a_welcome(),
    TokenizerFiles({"tokenizer.json": b"{}\xff"}),
    Update(DELTAS, [(4, "it broke")], LOAD, 12.5, "draining"),
    Update([], [], LOAD, 12.5, ""),
]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda one: type(one).__name__)
def test_a_command_arrives_whole(command: msgspec.Struct) -> None:
    """Service level, tenant, format, resumed tokens, hashes and trace travel as all else does."""
    codec = Codec[Command](Command)
    assert codec.decode(codec.encode(command)) == command


@pytest.mark.parametrize("report", REPORTS, ids=lambda one: type(one).__name__)
def test_a_report_arrives_whole(report: msgspec.Struct) -> None:
    """Cards, outcomes, traces, phases, embeddings, and all of the load."""
    codec = Codec[Report](Report)
    assert codec.decode(codec.encode(report)) == report


def test_a_pace_arrives_as_one() -> None:
    """Not as a number: workers compare by identity."""
    codec = Codec[Command](Command)
    arrived = codec.decode(codec.encode(SetPace(0, Pace.SPARING)))
    assert isinstance(arrived, SetPace)
    assert arrived.pace is Pace.SPARING


def test_what_a_newer_version_adds_is_left_out() -> None:
    """Nodes are upgraded one by one: a field that is not known yet breaks no connection."""
    codec = Codec[Command](Command)
    raw = msgspec.msgpack.decode(codec.encode(Cancel(1)))
    assert codec.decode(msgspec.msgpack.encode({**raw, "reason": "because"})) == Cancel(1)


@given(st.binary(max_size=200) | st.recursive(st.none() | st.integers(), st.lists).map(repr))
def test_bytes_that_are_no_message_are_a_value_error(data: bytes | str) -> None:
    """Whatever comes over a network, nothing else is ever raised."""
    for codec in (Codec[Command](Command), Codec[Report](Report)):
        with pytest.raises(ValueError, match="no message of this protocol"):
            codec.decode(data if isinstance(data, bytes) else data.encode())


@given(st.sampled_from([*COMMANDS, *REPORTS]), st.data())
def test_a_message_that_was_damaged_is_a_message_or_a_value_error(
    message: msgspec.Struct, data: st.DataObject
) -> None:
    """Cut short, or with another byte at any place."""
    kind = Command if message in COMMANDS else Report
    codec = Codec[object](kind)
    whole = codec.encode(message)
    place = data.draw(st.integers(0, len(whole) - 1))
    other = bytes([data.draw(st.integers(0, 255))])
    for damaged in (whole[:place], whole[:place] + other + whole[place + 1 :]):
        try:
            codec.decode(damaged)
        except ValueError:
            continue


def test_deep_nests_are_no_message() -> None:
    """An array in an array in an array has no end that a stack would hold."""
    deep = b"\x81\xa1x" + b"\x91" * 100_000 + b"\xc0"
    with pytest.raises(ValueError, match="no message"):
        Codec[Command](Command).decode(deep)


@given(st.lists(st.integers(-(1 << 63), (1 << 63) - 1)))
def test_token_ids_are_the_same_on_a_machine_of_the_other_byte_order(ids: list[int]) -> None:
    """They travel with the lowest byte first, whoever sends them."""
    sent = to_bytes(compact(ids))
    assert sent == b"".join(one.to_bytes(8, "little", signed=True) for one in ids)
    assert list(from_bytes(sent)) == ids
    other = "big" if sys.byteorder == "little" else "little"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(token_ids, "sys", type("Other", (), {"byteorder": other}))
        turned = array("q", compact(ids))
        turned.byteswap()
        assert to_bytes(turned) == sent
        assert from_bytes(sent) == turned


def test_half_a_token_id_is_none() -> None:
    """Seven bytes are an error, not a shorter prompt."""
    with pytest.raises(ValueError, match="multiple of item size"):
        from_bytes(b"\x00" * 15)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.booleans())))
def test_a_number_stands_for_one_request_and_is_never_given_again(
    events: list[tuple[str, bool]],
) -> None:
    """However often the same request comes and goes."""
    numbers, running, given_out = Numbers(), {}, set()
    for request_id, comes in events:
        if comes and request_id not in running:
            number = running[request_id] = numbers.give(request_id)
            assert number not in given_out
            given_out.add(number)
        elif not comes:
            assert numbers.forget(request_id) == running.pop(request_id, None)
        assert {name: numbers.of(name) for name in running} == running
        assert all(numbers.request_id(number) == name for name, number in running.items())
        assert all(numbers.request_id(n) is None for n in given_out - set(running.values()))
