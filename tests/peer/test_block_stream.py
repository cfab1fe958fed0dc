"""Frames of messages with KV blocks, however the network splits them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from draftgate.backends.framing import Codec, FrameChannel
from draftgate.backends.kv_transfer.exchange import AdoptBlocks, BlockCount, CountBlocks
from draftgate.backends.kv_transfer.format import KvChunk
from draftgate.backends.kv_transfer.transfer import TransferEnd, TransferOutcome
from draftgate.backends.peer.blocks import (
    CancelKvCall,
    FetchBlocks,
    FetchedBlocks,
    KvCallFailed,
    block_stream,
)
from draftgate.backends.remote_worker import KvCall, KvReply
from tests.peer.blocks import FORM

ids = st.integers(0, 1 << 40)
hashes = st.lists(st.binary(min_size=16, max_size=16), max_size=4).map(tuple)
chunks = st.builds(
    KvChunk,
    hashes,
    st.lists(st.integers(0, (1 << 32) - 1), max_size=4).map(tuple),
    st.binary(max_size=300).map(memoryview),
)
outcomes = st.builds(TransferOutcome, st.sampled_from(TransferEnd), ids, ids)
messages = st.one_of(
    st.builds(KvCall, ids, st.builds(CountBlocks, hashes, st.booleans())),
    st.builds(KvCall, ids, st.builds(AdoptBlocks, chunks, st.binary(max_size=16))),
    st.builds(KvReply, ids, st.one_of(chunks, st.builds(BlockCount, ids, st.booleans()))),
    st.builds(
        FetchBlocks, ids, st.text(max_size=9), hashes, ids, st.none() | st.just(0.5), st.booleans()
    ),
    st.builds(FetchedBlocks, ids, st.none() | outcomes),
    st.builds(KvCallFailed, ids, st.text(max_size=9)),
    st.builds(CancelKvCall, ids),
)
ANY = KvCall | KvReply | FetchBlocks | FetchedBlocks | KvCallFailed | CancelKvCall


@given(sent=st.lists(messages, max_size=6), sizes=st.lists(st.integers(1, 90), min_size=1))
def test_messages_arrive_whole_in_reads_of_any_size(sent: list[ANY], sizes: list[int]) -> None:
    """The other end gets equal messages with the bytes of their blocks, in order."""
    codec, received = Codec[ANY](ANY), list[ANY]()
    stream: FrameChannel[ANY] = block_stream(ANY, FORM, received.append, lambda: None)
    data = b"".join(bytes(part) for message in sent for part in codec.frame(message))
    place = turn = 0
    while place < len(data):
        target = stream.get_buffer(-1)
        size = min(sizes[turn % len(sizes)], len(target), len(data) - place)
        target[:size] = data[place : place + size]
        stream.buffer_updated(size)
        place, turn = place + size, turn + 1
    assert received == sent


@given(message=messages)
def test_encoded_messages_contain_no_blocks(message: ANY) -> None:
    """The bytes of blocks are beside the message, in the memory in which they were."""
    codec = Codec[ANY](ANY)
    chunk = message.result if isinstance(message, KvReply) else None
    if isinstance(message, KvCall) and isinstance(message.operation, AdoptBlocks):
        chunk = message.operation.chunk
    _, blocks = codec.frame(message)
    if isinstance(chunk, KvChunk) and chunk.data:
        assert blocks.obj is chunk.data.obj
    else:
        assert not blocks
