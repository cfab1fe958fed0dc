"""A channel carries messages of any size, limits their size, and interleaves them."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftgate.backends.peer import channel as channels
from draftgate.backends.peer.channel import (
    MOST_COMMAND_BYTES,
    MOST_FRAME_BYTES,
    PIECE_BYTES,
    MessagePiece,
    PeerChannel,
)
from draftgate.backends.remote_worker import (
    Cancel,
    Codec,
    Command,
    Report,
    Submit,
    TokenizerFiles,
)
from draftgate.backends.testing import make_request
from draftgate.backends.token_ids import compact
from tests.gateway.harness import ScriptedBackend, running, until
from tests.peer.harness import linked_to

PROMPT_TOKENS = 500_000
"""The number of tokens in a prompt of about 1 MB."""


class RecordingSocket:
    """A socket that records the frames of a channel."""

    def __init__(self) -> None:
        self.frames: list[bytes] = []

    async def send_bytes(self, data: bytes) -> None:
        self.frames.append(data)


def a_channel(line: RecordingSocket, most_bytes: int = MOST_COMMAND_BYTES) -> PeerChannel[Report]:
    return PeerChannel[Report](line, Report, most_bytes)


@given(st.integers(0, 5000), st.integers(1, 2000))
def test_message_of_any_size_arrives_whole(size: int, piece_bytes: int) -> None:
    """Two consecutive messages around the size of a piece arrive whole."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(channels, "PIECE_BYTES", piece_bytes)
        line = RecordingSocket()
        channel = a_channel(line)
        messages = [TokenizerFiles({"a": bytes(size)}), TokenizerFiles({"b": bytes(size // 2)})]
        for message in messages:
            asyncio.run(channel.send(message))
        assert max(map(len, line.frames)) <= piece_bytes + 64
        read = [channel.read(frame) for frame in line.frames]
        assert [message for message in read if message is not None] == messages


@given(st.integers(1, 3))
def test_oversized_message_is_rejected_before_its_last_piece(over: int) -> None:
    """The channel rejects an oversized message before its end, so memory stays bounded."""
    line = RecordingSocket()
    channel = a_channel(line, most_bytes=3 * PIECE_BYTES)
    asyncio.run(channel.send(TokenizerFiles({"a": bytes((3 + over) * PIECE_BYTES)})))
    for frame in line.frames[:3]:
        assert channel.read(frame) is None
    with pytest.raises(ValueError, match="exceeds"):
        channel.read(line.frames[3])


def test_piece_within_a_piece_is_rejected() -> None:
    """The channel rejects nested pieces, which would bypass the size limit."""
    codec = Codec[Report](Report)
    inner = codec.encode(MessagePiece(b"x", last=True))
    with pytest.raises(ValueError, match="a piece contains another piece"):
        a_channel(RecordingSocket()).read(codec.encode(MessagePiece(inner, last=True)))


async def test_small_messages_pass_between_pieces_of_a_prompt() -> None:
    """Small messages pass between the frames of a prompt of 1 MB."""
    line = RecordingSocket()
    channel = a_channel(line)
    prompt = make_request_of(PROMPT_TOKENS)
    large = asyncio.create_task(channel.send(Submit("1", prompt)))
    num_cancels = 0
    while not large.done():
        await asyncio.sleep(0)
        await channel.send(Cancel(str(num_cancels)))
        num_cancels += 1
    pieces = len(line.frames) - num_cancels
    assert pieces >= 8 * PROMPT_TOKENS // PIECE_BYTES
    assert num_cancels >= pieces
    assert max(map(len, line.frames)) < MOST_FRAME_BYTES
    commands = PeerChannel[Command](RecordingSocket(), Command, MOST_COMMAND_BYTES)
    read = [commands.read(frame) for frame in line.frames]
    assert [command for command in read if isinstance(command, Submit)] == [Submit("1", prompt)]
    assert sum(isinstance(command, Cancel) for command in read) == num_cancels


def make_request_of(tokens: int):
    backend = ScriptedBackend()
    return replace(make_request(backend), prompt_ids=compact(range(tokens)))


async def test_prompt_of_1_mb_reaches_the_worker(scripted: ScriptedBackend) -> None:
    """A prompt of 1 MB and a later cancel reach the worker over a real connection."""
    scripted.card = replace(scripted.card, max_model_len=1 << 20)
    scripted.kv_tokens = 1 << 20
    async with running(backends=[scripted]) as peer, linked_to(peer.url) as backend:
        prompt = make_request_of(PROMPT_TOKENS)
        async with aclosing(backend.generate(prompt)) as stream:
            received = await scripted.submitted.get()
            assert received.prompt_ids == prompt.prompt_ids
            scripted.emit(received, "one")
            assert (await anext(stream)).text == "one"
        assert await scripted.abandoned.get() == received.request_id
        await until(lambda: len(scripted.streams) == 0)
