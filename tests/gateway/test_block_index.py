"""Tests of the index of a server's cached blocks, and of the order of its events."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from draftgate.backends.openai.block_index import BlockIndex, BlockRemoved, BlockStored
from draftgate.backends.openai.kv_events import EventLog
from draftgate.backends.prompt_blocks import PromptBlocks
from tests.examples import examples
from tests.gateway.event_publisher import CachingServer, Tokens, cached_tokens

PROMPTS = st.lists(st.integers(0, 1), min_size=3, max_size=9).map(tuple)


def ask(index: BlockIndex, prompt: Tokens, adapter: str = "", salt: str = "") -> int:
    return index.cached_tokens(PromptBlocks(prompt, None, salt), adapter)


class FollowedServer(RuleBasedStateMachine):
    """A server whose batches are delivered, lost or repeated, and the log that follows it.

    Whatever happens, the index holds what the server held after the last batch that the log has
    applied, or a part of it if older batches were lost or if the index is full.
    """

    @initialize(
        most=st.sampled_from([3, 1000]),
        keeps=st.sampled_from([0, 2, 100]),
        arrays=st.booleans(),
        late=st.integers(0, 3),
        cut=st.sampled_from([2, 1000]),
    )
    def start(self, most: int, keeps: int, arrays: bool, late: int, cut: int) -> None:
        self.most, self.cut = most, cut
        self.form: dict[str, Any] = {"keeps": keeps, "arrays": arrays}
        self.log = EventLog(BlockIndex(most))
        self.boot()
        for token in range(late):
            self.server.compute((token, token, token))
            self.publish()

    def boot(self) -> None:
        self.server = CachingServer(**self.form)
        self.truth: dict[int, frozenset[Tokens]] = {-1: frozenset()}
        self.followed: dict[int, frozenset[Tokens]] = {-1: frozenset()}
        self.connected = False

    def publish(self) -> tuple[int, bytes]:
        batch = self.server.publish()
        self.truth[batch[0]] = frozenset(self.server.cached)
        return batch

    def recover(self) -> None:
        self.followed = self.truth
        if not self.log.recover(self.server.replay(self.log.check_from)[: self.cut]):
            assert self.log.check_from == 0
            assert len(self.log.index) == 0
            self.log.recover(self.server.replay(0)[: self.cut])

    def deliver(self, batch: tuple[int, bytes]) -> None:
        if not self.connected:
            self.connected = True
            self.recover()
        self.followed = self.truth
        if not self.log.receive(*batch):
            self.recover()
            self.log.accept(*batch)
        assert self.log.is_current

    @rule(
        prompts=st.lists(PROMPTS, max_size=3),
        again=st.booleans(),
        evicted=st.integers(0, 4),
        fate=st.sampled_from(["sent", "sent", "sent", "sent twice", "lost"]),
    )
    def work(self, prompts: list[Tokens], again: bool, evicted: int, fate: str) -> None:
        for prompt in prompts:
            self.server.compute(prompt, again=again)
        for _ in range(min(evicted, len(self.server.cached))):
            self.server.evict()
        batch = self.publish()
        for _ in range({"sent": 1, "sent twice": 2, "lost": 0}[fate]):
            self.deliver(batch)

    @rule()
    def clear(self) -> None:
        self.server.clear()

    @rule()
    def disconnect(self) -> None:
        self.log.lose()
        self.connected = False

    @rule()
    def reconnect(self) -> None:
        self.disconnect()
        self.connected = True
        self.recover()

    @rule()
    def restart(self) -> None:
        followed = self.followed
        self.log.lose()
        self.boot()
        self.followed = followed

    @rule()
    def send_garbage(self) -> None:
        self.server.number += 1
        batch = self.server.number, msgspec.msgpack.encode([0.0, [{"type": "Unheard"}]])
        self.server.batches.append(batch)
        self.truth[batch[0]] = frozenset(self.server.cached)
        self.deliver(batch)
        assert not self.log.index.is_complete

    @invariant()
    def index_is_what_the_server_had(self) -> None:
        index = self.log.index
        last = self.log.check_from if index.is_complete or len(index) else -1
        had = self.followed.get(last, frozenset())
        assert len(index) <= min(self.most, len(had))
        for number in range(1, 2**7):
            prompt = tuple(int(bit) for bit in f"{number:b}")
            expected = cached_tokens(had, prompt, self.server.block_tokens)
            found = ask(index, prompt)
            assert found <= expected
            if index.is_complete and self.most > 100:
                assert found == expected


TestFollowedServer = FollowedServer.TestCase
TestFollowedServer.settings = settings(
    max_examples=examples(200), stateful_step_count=30, deadline=None
)


def stored(
    names: list[int], parent: int | None, tokens: list[int], **more: Any
) -> tuple[BlockStored]:
    return (BlockStored(names, parent, tokens, **{"block_size": 2, **more}),)


def test_first_batch_of_a_server_makes_its_index_complete() -> None:
    """A block that is missing is known to be missing if all batches were received from the first
    one on, and not otherwise."""
    for begin in (0, 1):
        server, log = CachingServer(keeps=0), EventLog(BlockIndex())
        for _ in range(begin):
            server.publish()
        server.compute((1, 2, 3))
        batch = server.publish()
        if not log.receive(*batch):
            log.recover([])
            log.accept(*batch)
        assert ask(log.index, (1, 2, 3)) == 2
        assert log.index.is_complete is (begin == 0)
    server.clear()
    log.receive(*server.publish())
    assert log.index.is_complete
    assert ask(log.index, (1, 2, 3)) == 0


def test_last_token_of_a_prompt_is_never_cached() -> None:
    """A server computes the last token of a prompt again, even if its block is cached."""
    index = BlockIndex()
    index.apply(stored([1, 2], None, [1, 2, 3, 4]))
    assert [ask(index, (1, 2, 3, 4, 5)[:length]) for length in range(6)] == [0, 0, 0, 2, 2, 4]


def test_prompts_share_blocks_only_within_a_salt_and_an_adapter() -> None:
    """A prompt with another salt or LoRA adapter has nothing cached, as on the server."""
    index = BlockIndex()
    index.apply(stored([1, 2], None, [1, 2, 3, 4], extra_keys=[["secret"], None]))
    both = [["sql", "secret"], ["sql"]]
    index.apply(stored([3, 4], None, [1, 2, 3, 4], extra_keys=both, lora_name="sql", lora_id=1))
    prompt = (1, 2, 3, 4, 5)
    assert ask(index, prompt, salt="secret") == 4
    assert ask(index, prompt, "sql", "secret") == 4
    assert {ask(index, prompt, *other) for other in [(), ("sql",), ("", "sql"), ("", "x")]} == {0}


@pytest.mark.parametrize(
    "more",
    [
        {"extra_keys": [[["image", 0]], None]},
        {"lora_id": 3},
        {"medium": "CPU"},
        {"kv_cache_spec_kind": "sliding_window"},
    ],
    ids=["image", "unnamed adapter", "host memory", "window"],
)
def test_blocks_that_no_text_can_hit_do_not_count(more: dict[str, Any]) -> None:
    """Blocks of images, of unnamed adapters, of other media and of windows do not count."""
    index = BlockIndex()
    index.apply(stored([1, 2], None, [1, 2, 3, 4], **more))
    index.apply(stored([3], 2, [5, 6], **more))
    assert len(index) == 0


def test_text_before_an_image_counts() -> None:
    """The blocks before an image are cached for every prompt that begins with them."""
    index = BlockIndex()
    keys = [None, [["image", 1]], None]
    index.apply(stored([1, 2, 3], None, [1, 2, 3, 4, 5, 6], extra_keys=keys))
    assert ask(index, (1, 2, 3, 4, 5, 6, 7)) == 2


def test_removal_in_another_group_or_medium_keeps_a_block() -> None:
    """A block stays cached while only copies of other layers or of other media are removed."""
    index = BlockIndex()
    index.apply(stored([1], None, [1, 2], group_idx=0))
    index.apply(stored([1], None, [1, 2], group_idx=1))
    index.apply([BlockRemoved([1], group_idx=1), BlockRemoved([1], "CPU", 0)])
    assert ask(index, (1, 2, 3)) == 2
    index.apply([BlockRemoved([1], "GPU", 0)])
    assert ask(index, (1, 2, 3)) == 0


def test_hashes_are_computed_once_for_each_block_size_and_adapter() -> None:
    """Chains of different block sizes are computed once each, and end at full blocks."""
    prompt = PromptBlocks(tuple(range(10)), None)
    assert [len(prompt.hashes("", size)) for size in (1, 3, 4, 16)] == [10, 3, 2, 0]
    assert prompt.hashes("", 3) is prompt.hashes("", 3)
    assert not set(prompt.hashes("a", 1)) & set(prompt.hashes("", 1))
