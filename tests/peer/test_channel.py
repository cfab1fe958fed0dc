"""A channel carries messages of any size, however the network splits them, up to a limit."""

from __future__ import annotations

import asyncio
import socket
from contextlib import aclosing
from dataclasses import replace
from itertools import cycle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftgate.backends.delta_reader import generate
from draftgate.backends.framing import (
    CLOSED,
    INVALID,
    TOO_LARGE,
    Codec,
    FrameChannel,
    FrameReader,
    FrameTooLarge,
    framed,
)
from draftgate.backends.peer.channel import (
    MOST_REPORT_BYTES,
)
from draftgate.backends.remote_worker import (
    Cancel,
    Command,
    Report,
    SetPace,
    TokenizerFiles,
    WorkerMessage,
)
from draftgate.backends.testing import make_request
from draftgate.backends.token_ids import compact
from draftgate.backends.types import Pace
from tests.gateway.harness import ScriptedBackend, running, until
from tests.peer.harness import linked_to

PROMPT_TOKENS = 500_000
"""The number of tokens in a prompt of about 1 MB."""

MOST_BYTES = 1000

commands = st.one_of(
    st.builds(Cancel, st.text(max_size=20)),
    st.builds(SetPace, st.text(max_size=20), st.sampled_from(Pace)),
)


def pieces(data: bytes, sizes: list[int]) -> list[bytes]:
    """Return data in pieces of these sizes, in turn."""
    found, begin, next_size = [], 0, cycle(sizes)
    while begin < len(data):
        size = next(next_size)
        found.append(data[begin : begin + size])
        begin += size
    return found


def read_frames(reader: FrameReader, data: bytes) -> list[bytes]:
    """Return the messages that these bytes complete."""
    found = []
    while data:
        size = min(len(data), len(reader.buffer()))
        reader.buffer()[:size] = data[:size]
        reader.advance(size)
        data = data[size:]
        while (frame := reader.next()) is not None:
            found.append(frame[0])
    return found


class Arrivals:
    """A channel and what it reports.

    Attributes:
        received: the received messages.
        ends: number of reported ends.
    """

    def __init__(self) -> None:
        self.received: list[Command] = []
        self.ends = 0
        self.channel = FrameChannel[Command](Command, MOST_BYTES, self.received.append, self._end)

    def arrive(self, data: bytes) -> None:
        """Let bytes arrive as the event loop does."""
        self.channel.get_buffer(-1)[: len(data)] = data
        self.channel.buffer_updated(len(data))

    def _end(self) -> None:
        self.ends += 1


@given(st.lists(st.binary(max_size=50)), st.lists(st.integers(1, 40), min_size=1))
def test_frames_arrive_whole_in_reads_of_any_size(sent: list[bytes], sizes: list[int]) -> None:
    """Messages arrive whole and in order, also empty messages."""
    reader = FrameReader(MOST_BYTES)
    data = b"".join(map(framed, sent))
    assert [one for piece in pieces(data, sizes) for one in read_frames(reader, piece)] == sent


@given(st.integers(0, 50), st.integers(1, 1 << 31))
def test_oversized_frame_is_rejected_at_its_length(most: int, over: int) -> None:
    """The receiver rejects a frame before it has any of its bytes, so memory stays bounded."""
    reader = FrameReader(most)
    assert read_frames(reader, framed(bytes(most))) == [bytes(most)]
    with pytest.raises(FrameTooLarge):
        read_frames(reader, (most + over).to_bytes(4, "big"))


@given(st.lists(commands), st.lists(st.integers(1, 90), min_size=1))
def test_messages_arrive_in_reads_of_any_size(sent: list[Command], sizes: list[int]) -> None:
    """The channel passes on each message once, in order."""
    arrivals, encode = Arrivals(), Codec[Command](Command).encode
    for piece in pieces(b"".join(framed(encode(message)) for message in sent), sizes):
        arrivals.arrive(piece)
    assert (arrivals.received, arrivals.ends) == (sent, 0)


@pytest.mark.parametrize(
    ("data", "reason"),
    [(framed(b"\xc1"), INVALID), ((MOST_BYTES + 1).to_bytes(4, "big"), TOO_LARGE)],
)
def test_invalid_frame_ends_the_channel_once(data: bytes, reason: str) -> None:
    """Messages before an invalid frame count, and those after it do not."""
    arrivals, cancel = Arrivals(), framed(Codec[Command](Command).encode(Cancel("1")))
    arrivals.arrive(cancel + data + cancel)
    arrivals.channel.connection_lost(None)
    assert arrivals.received == [Cancel("1")]
    assert (arrivals.channel.reason, arrivals.ends) == (reason, 1)


class RecordingTransport(asyncio.Transport):
    """A transport that records what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[bytes] = []

    def write(self, data: bytes) -> None:
        self.written.append(data)


async def test_messages_of_one_call_are_one_write() -> None:
    """Messages that are sent together wake the other end once."""
    channel, transport = Arrivals().channel, RecordingTransport()
    channel._transport = transport
    messages: list[WorkerMessage] = [Cancel(str(number)) for number in range(5)]
    channel.send(*messages)
    (data,) = transport.written
    there = Arrivals()
    there.arrive(data)
    assert there.received == messages


async def test_closing_delivers_what_was_sent() -> None:
    """A message that exceeds the buffers of the system arrives whole before the end."""
    files = TokenizerFiles({"a": bytes(32 << 20)})
    received: list[Report] = []
    ended = asyncio.Event()
    here, there = socket.socketpair()
    loop = asyncio.get_running_loop()
    sender = FrameChannel[Command](Command, MOST_BYTES, lambda _: None, lambda: None)
    receiver = FrameChannel[Report](Report, MOST_REPORT_BYTES, received.append, ended.set)
    for channel, end in ((sender, here), (receiver, there)):
        transport, _ = await loop.create_connection(asyncio.Protocol, sock=end)
        channel.take_over(transport)
    sender.send(files)
    sender.close()
    async with asyncio.timeout(60):
        await ended.wait()
    assert (received, receiver.reason) == ([files], CLOSED)


def make_request_of(tokens: int):
    backend = ScriptedBackend()
    return replace(make_request(backend), prompt_ids=compact(range(tokens)))


async def test_prompt_of_1_mb_reaches_the_worker(scripted: ScriptedBackend) -> None:
    """A prompt of 1 MB and a later cancel reach the worker over a real connection."""
    scripted.card = replace(scripted.card, max_model_len=1 << 20)
    scripted.kv_tokens = 1 << 20
    async with running(backends=[scripted]) as peer, linked_to(peer.url) as backend:
        prompt = make_request_of(PROMPT_TOKENS)
        async with aclosing(generate(backend, prompt)) as stream:
            received = await scripted.submitted.get()
            assert received.prompt_ids == prompt.prompt_ids
            scripted.emit(received, "one")
            assert (await anext(stream)).text == "one"
        assert await scripted.abandoned.get() == received.request_id
        await until(lambda: len(scripted.sinks) == 0)
