"""Messages between a gateway and a worker in another process or on another machine."""

from __future__ import annotations

import socket
import sys
from array import array
from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftgate.backends import token_ids
from draftgate.backends.engine.channel import SocketChannel
from draftgate.backends.framing import Codec
from draftgate.backends.peer.link import LinkIds
from draftgate.backends.prompt_logprobs import PromptLogprobs
from draftgate.backends.remote_worker import (
    Cancel,
    Command,
    Failed,
    FetchTokenizer,
    Loading,
    Ready,
    Report,
    SetPace,
    SetRole,
    Start,
    Submit,
    TokenizerFiles,
    Update,
    WorkerMessage,
)
from draftgate.backends.token_ids import compact, from_bytes, to_bytes
from draftgate.backends.types import (
    Capabilities,
    Delta,
    FinishReason,
    GenerationRequest,
    GrammarKind,
    GrammarSpec,
    ModelCard,
    Pace,
    Phases,
    ResumedChoice,
    SamplingParams,
    SpeculationOutcome,
    StepTrace,
    Task,
    TokenLogprob,
)
from draftgate.backends.worker_config import WorkerConfig
from draftgate.policies.types import (
    Role,
    ServiceLevel,
    SpeculationMode,
    SpeculationPlan,
    WorkerLoad,
    WorkerSpeed,
)

PLAN = SpeculationPlan("auto", SpeculationMode.AUTO, "ngram", 4, "because", 0.1)
FULL = GenerationRequest(
    "b",
    compact([3, 1 << 40]),
    SamplingParams(5, (1 << 64) - 1, 0.8, logit_bias=((7, -1.5),), stop=("x",)),
    PLAN,
    n=2,
    tenant="t",
    grammar=GrammarSpec(GrammarKind.REGEX, "a+"),
    resumed=(ResumedChoice(1, (8, 9), (10, 11)),),
    service=ServiceLevel(1.5, 0.0125, -(1 << 31)),
    traced=True,
    block_hashes=(b"\x00" * 16, b"\xff" * 16),
    trace_context=(("traceparent", "00-1-2-01"),),
    prediction_ids=(4, 1 << 40),
    age_s=2.5,
)
PLAIN = GenerationRequest("a", compact([1, 2]), SamplingParams(5, 0, prompt_logprobs=2), PLAN)
EMBEDDING = GenerationRequest("c", compact([]), SamplingParams(0, 0), PLAN, task=Task.EMBED)
OUTCOME = SpeculationOutcome(3, 9, 4, (1, 1, 0, 1), (), 2, 1)
STEP = StepTrace(2, "ngram", 3, (5, 9), 1, (0.75, 0.5), 0.125)
PHASES = Phases(1.0, 2.0, ((3.0, 16), (4.0, 5)), 4.0, recorded=True)
SCORED = PromptLogprobs(1, b"\x00\x80\xff1", b"1234", b"", b"\x01")
LOGPROBS = (TokenLogprob(5, -0.5, ((5, -0.5), (6, -1.5))),)
DELTAS = [
    ("3", Delta(1, (5, 6), "tëxt", LOGPROBS, FinishReason.STOP, OUTCOME, 16, (STEP,), PHASES)),
    ("c", Delta(0, (), "", finish_reason=FinishReason.STOP, pooled=b"\x00\x80\xff")),
    ("a", Delta(0, (5,), "t", prompt_logprobs=SCORED)),
    ("d", Delta(0, (5,), "t", finish_reason=FinishReason.STOP, stop_text="\n")),
]
LOAD = WorkerLoad(
    *(1, 2, 3, 4, 0.25, 0.7, ("ngram", "draft_model"), 0.05),
    *(64, 900, 512, 16, WorkerSpeed(0.02, 1e-4, 3e-4), 5),
)
CARD = ModelCard("m", "r", 512, "c", 1, Capabilities(exact=True), 640, (0,))
COMMANDS = [
    Start(WorkerConfig(model="m", kv_bytes=1 << 40)),
    Submit("1", FULL, 7),
    Submit("2", PLAIN),
    Submit("3", EMBEDDING),
    Cancel("1"),
    SetPace("1", Pace.PAUSED),
    SetRole(Role.DECODE),
    FetchTokenizer(),
]
REPORTS = [
    Loading(0.5),
    Ready(CARD),
    Ready(CARD, "epoch", "digest", streams_blocks=True, changes_role=True),
    TokenizerFiles({"tokenizer.json": b"{}\xff"}),
    Update(DELTAS, LOAD, [("4", "it broke")], 12.5, "draining", 9, leaving=True, role=Role.PREFILL),
    Update([], LOAD, [("4", "the files have changed")], without_adapter=("4",)),
    Failed("ValueError", "no such dtype"),
]


def name_of(message: object) -> str:
    return type(message).__name__


def over_codec(message: WorkerMessage, received: object) -> object:
    """Return the message after encoding and decoding with msgpack, as between nodes."""
    codec = Codec[object](received)
    return codec.decode(codec.encode(message))


def over_socket(message: WorkerMessage, received: object) -> object:
    """Return the message after a transfer over a socket, as with an engine process."""
    sender, receiver = socket.socketpair()
    with sender, receiver:
        SocketChannel(sender, received).send(message)
        return next(iter(SocketChannel(receiver, received)))


@pytest.mark.parametrize("carried", [over_codec, over_socket])
@pytest.mark.parametrize("command", COMMANDS, ids=name_of)
def test_command_arrives_whole(
    carried: Callable[[WorkerMessage, object], object], command: WorkerMessage
) -> None:
    """A command arrives with service level, tenant, grammar, resumed tokens, hashes and trace
    context."""
    assert carried(command, Command) == command


def test_request_of_an_older_node_has_no_age() -> None:
    """A request without the field counts as new, so its worker ranks it by its arrival there."""
    fields = msgspec.msgpack.decode(Codec[object](Command).encode(Submit("1", PLAIN)))
    del fields["request"]["age_s"]
    read = Codec[Submit](Command).decode(msgspec.msgpack.encode(fields))
    assert read == Submit("1", PLAIN)
    assert read.request.age_s == 0.0


@pytest.mark.parametrize("carried", [over_codec, over_socket])
@pytest.mark.parametrize("report", REPORTS, ids=name_of)
def test_report_arrives_whole(
    carried: Callable[[WorkerMessage, object], object], report: WorkerMessage
) -> None:
    """A report arrives with cards, outcomes, step traces, phases, embeddings and the whole load."""
    assert carried(report, Report) == report


@pytest.mark.parametrize("carried", [over_codec, over_socket])
@pytest.mark.parametrize("pace", Pace)
def test_pace_arrives_as_enum_member(
    carried: Callable[[WorkerMessage, object], object], pace: Pace
) -> None:
    """A pace arrives as an enum member, because workers compare paces by identity."""
    arrived = carried(SetPace("0", pace), Command)
    assert isinstance(arrived, SetPace)
    assert arrived.pace is pace


@pytest.mark.parametrize("role", Role)
def test_role_arrives_as_enum_member(role: Role) -> None:
    """A role arrives as an enum member, because policies compare roles by identity."""
    command, report = over_codec(SetRole(role), Command), over_codec(Update([], role=role), Report)
    assert isinstance(command, SetRole)
    assert isinstance(report, Update)
    assert command.role is report.role is role


def test_unknown_field_of_newer_version_is_ignored() -> None:
    """The decoder ignores an unknown field, so nodes of two versions can connect."""
    codec = Codec[Command](Command)
    raw = msgspec.msgpack.decode(codec.encode(Cancel("1")))
    assert codec.decode(msgspec.msgpack.encode({**raw, "reason": "because"})) == Cancel("1")


@given(st.binary(max_size=200) | st.recursive(st.none() | st.integers(), st.lists).map(repr))
def test_bytes_that_are_not_a_message_raise_value_error(data: bytes | str) -> None:
    """Any invalid bytes raise ValueError and no other exception."""
    for codec in (Codec[Command](Command), Codec[Report](Report)):
        with pytest.raises(ValueError, match="not a message of this protocol"):
            codec.decode(data if isinstance(data, bytes) else data.encode())


@given(st.sampled_from([*COMMANDS, *REPORTS]), st.data())
def test_damaged_message_decodes_or_raises_value_error(
    message: WorkerMessage, data: st.DataObject
) -> None:
    """A message that is cut or has a changed byte decodes or raises ValueError."""
    kind = Command if message in COMMANDS else Report
    codec = Codec[object](kind)
    encoded = codec.encode(message)
    place = data.draw(st.integers(0, len(encoded) - 1))
    other = bytes([data.draw(st.integers(0, 255))])
    for damaged in (encoded[:place], encoded[:place] + other + encoded[place + 1 :]):
        try:
            codec.decode(damaged)
        except ValueError:
            continue


def test_deeply_nested_arrays_raise_value_error() -> None:
    """The decoder rejects nesting that would exhaust the stack."""
    deep = b"\x81\xa1x" + b"\x91" * 100_000 + b"\xc0"
    with pytest.raises(ValueError, match="not a message"):
        Codec[Command](Command).decode(deep)


@given(st.lists(st.integers(-(1 << 63), (1 << 63) - 1)))
def test_token_ids_are_little_endian_on_every_machine(ids: list[int]) -> None:
    """A big-endian machine sends and reads the same bytes."""
    sent = to_bytes(compact(ids))
    assert sent == b"".join(each.to_bytes(8, "little", signed=True) for each in ids)
    assert list(from_bytes(sent)) == ids
    other = "big" if sys.byteorder == "little" else "little"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(token_ids, "sys", type("Other", (), {"byteorder": other}))
        turned = array("q", compact(ids))
        turned.byteswap()
        assert to_bytes(turned) == sent
        assert from_bytes(sent) == turned


def test_incomplete_token_id_raises_value_error() -> None:
    """Fifteen bytes of token ids raise ValueError."""
    with pytest.raises(ValueError, match="multiple of item size"):
        from_bytes(b"\x00" * 15)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.booleans())))
def test_link_id_is_never_used_twice(events: list[tuple[str, bool]]) -> None:
    """Every attempt of a request has a new id."""
    ids, running, given_out = LinkIds(), {}, set()
    for request_id, starts in events:
        if starts and request_id not in running:
            link_id = running[request_id] = ids.new_id(request_id)
            assert link_id not in given_out
            given_out.add(link_id)
        elif not starts:
            assert ids.forget(request_id) == running.pop(request_id, None)
        assert {name: ids.id_of(name) for name in running} == running
        assert all(ids.request_of(link_id) == name for name, link_id in running.items())
        assert all(ids.request_of(each) is None for each in given_out - set(running.values()))
