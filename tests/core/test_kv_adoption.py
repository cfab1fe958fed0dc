"""Import of KV blocks into the prefix cache: allocation, holds and their end."""

from __future__ import annotations

from array import array

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from draftgate.backends.core.draft_pages import DraftPages, DraftTable
from draftgate.backends.core.kv_blocks import KvBlocks, OutOfBlocks
from draftgate.backends.core.prefix_cache import extend_chain
from tests.examples import examples

BLOCK = 4
HOLD_S = 10.0
PROMPTS = (
    tuple(range(40)),
    tuple(range(100, 140)),
    (*range(20), *range(500, 520)),  # shares five blocks with the first prompt
)


def chain(tokens: tuple[int, ...], tenant: str = "") -> list[bytes]:
    hashes: list[bytes] = []
    extend_chain(hashes, tenant, tokens, BLOCK)
    return hashes


class ImportMachine(RuleBasedStateMachine):
    """A state machine that imports prefixes while sequences and draft pages come and go."""

    @initialize(num_blocks=st.integers(2, 30))
    def start(self, num_blocks):
        self.blocks = KvBlocks(num_blocks, BLOCK)
        self.pages = DraftPages(self.blocks, 1, BLOCK, num_blocks + 1)
        self.tables: list[tuple[array, int]] = []  # with the number of the prompt
        self.drafts: list[DraftTable] = []
        self.now_s = 0.0
        self.held: dict[bytes, float] = {}  # upper bound of the holds

    @rule(prompt=st.sampled_from(range(3)), first=st.integers(0, 9), count=st.integers(1, 10))
    def adopt(self, prompt, first, count):
        hashes = chain(PROMPTS[prompt])[first : first + count]
        lent, users = set(self.blocks._lent), [list(table) for table, _ in self.tables]
        free = self.blocks.num_free
        known = self.blocks._cache.locate(hashes)
        held = set(self.blocks._cache._held)
        adopted = self.blocks.adopt(hashes, self.now_s + HOLD_S)
        assert set(self.blocks._lent) == lent
        assert [list(table) for table, _ in self.tables] == users
        assert not set(adopted.values()) & {block for table in users for block in table}
        assert self.blocks.num_free == free  # held blocks still count as free
        missing = [index for index, block in enumerate(known) if block is None]
        assert list(adopted) == missing[: len(adopted)]  # no gap before the end
        assert held <= set(self.blocks._cache._held)  # no other import is displaced
        self.held.update(dict.fromkeys(hashes, self.now_s + HOLD_S))

    @rule(prompt=st.sampled_from(range(3)))
    def hold(self, prompt):
        hashes, free = chain(PROMPTS[prompt]), self.blocks.num_free
        assert self.blocks.hold(hashes, self.now_s + HOLD_S) == len(self.blocks.located(hashes))
        assert self.blocks.num_free == free
        self.held.update(dict.fromkeys(hashes, self.now_s + HOLD_S))

    @rule(prompt=st.sampled_from(range(3)), tokens=st.integers(1, 40))
    def admit(self, prompt, tokens):
        hashes = chain(PROMPTS[prompt])[: (tokens - 1) // BLOCK]
        found = self.blocks.num_cached(hashes)
        table = array("q")
        needed, free = self.blocks.needed(hashes, tokens), self.blocks.num_free
        if needed > free:
            with pytest.raises(OutOfBlocks):
                self.blocks.admit(table, hashes, tokens)
            return
        assert self.blocks.admit(table, hashes, tokens) == found
        assert self.blocks.num_free == free - needed
        self.tables.append((table, prompt))

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def finish(self, data):
        table, prompt = data.draw(st.sampled_from(self.tables))
        self.tables = [one for one in self.tables if one[0] is not table]
        hashes = chain(PROMPTS[prompt])
        self.blocks.confirm(table, hashes, range(min(len(table), len(hashes))))
        self.blocks.release(table)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def preempt(self, data):
        table, _ = data.draw(st.sampled_from(self.tables))
        self.tables = [one for one in self.tables if one[0] is not table]
        self.blocks.release(table)

    @rule(tokens=st.integers(1, 20))
    def draft(self, tokens):
        table = DraftTable()
        held = self.blocks._cache.num_held
        try:
            self.pages.extend(table, tokens)
        except OutOfBlocks:
            self.pages.release(table)
        else:
            self.drafts.append(table)
        assert self.blocks._cache.num_held == held

    @precondition(lambda self: self.drafts)
    @rule()
    def forget_draft(self):
        self.pages.release(self.drafts.pop())

    @rule(seconds=st.sampled_from((1.0, 4.0, 11.0)))
    def wait(self, seconds):
        self.now_s += seconds
        self.blocks.expire_holds(self.now_s)
        self.held = {h: until_s for h, until_s in self.held.items() if until_s > self.now_s}

    @invariant()
    def nothing_is_lost_and_no_hold_outlives_its_time(self):
        if not hasattr(self, "blocks"):
            return
        self.blocks.check_integrity([table for table, _ in self.tables])
        assert self.blocks._cache.num_held <= len(self.held)

    def teardown(self):
        if hasattr(self, "blocks"):
            for table, _ in self.tables:
                self.blocks.release(table)
            for table in self.drafts:
                self.pages.release(table)
            assert self.blocks.num_free == self.blocks.num_blocks
            self.blocks.check_integrity([])


ImportMachine.TestCase.settings = settings(max_examples=examples(150), stateful_step_count=40)
TestImports = ImportMachine.TestCase


def test_request_uses_an_imported_prefix() -> None:
    """A request shares all imported blocks of its prefix and computes only the rest."""
    blocks, hashes = KvBlocks(16, BLOCK), chain(PROMPTS[0])
    adopted = blocks.adopt(hashes[:4], HOLD_S)
    more = blocks.adopt(hashes[4:6], HOLD_S, parent=hashes[3])
    table = array("q")
    assert blocks.admit(table, hashes[:9], 40) == 6
    assert list(table[:6]) == [*adopted.values(), *more.values()]
    assert list(table) == list(range(table[0], table[0] + 10))  # one run, as computed prefixes have


@pytest.mark.parametrize(
    ("now_s", "imported", "computed"), [(HOLD_S - 1.0, 3, 1), (HOLD_S, 1, 3)], ids=["held", "over"]
)
def test_held_blocks_outlast_newer_cached_blocks(
    now_s: float, imported: int, computed: int
) -> None:
    """Eviction spares a held prefix as long as others are cached, and not after the hold."""
    blocks, theirs, own = KvBlocks(6, BLOCK), chain(PROMPTS[0]), chain(PROMPTS[1])
    blocks.adopt(theirs[:3], HOLD_S)
    table = array("q")
    blocks.admit(table, [], 12)
    blocks.confirm(table, own, range(3))
    blocks.expire_holds(now_s)
    blocks.release(table)
    blocks.extend(array("q"), 2 * BLOCK)
    assert len(blocks.located(theirs)) == imported
    assert len(blocks.located(own)) == computed


def test_a_sequence_gets_held_blocks_before_another_is_preempted() -> None:
    """A running sequence takes held blocks from the end of their prefix when no others are left."""
    blocks, hashes = KvBlocks(6, BLOCK), chain(PROMPTS[0])
    blocks.adopt(hashes[:4], HOLD_S)
    table = array("q")
    blocks.extend(table, 3 * BLOCK)
    assert len(table) == 3
    assert len(blocks.located(hashes)) == 3


def test_used_prefix_is_an_ordinary_prefix_afterwards() -> None:
    """After a request has used an imported prefix, eviction takes it in the usual order."""
    blocks, hashes = KvBlocks(6, BLOCK), chain(PROMPTS[0])
    blocks.adopt(hashes[:3], HOLD_S)
    table = array("q")
    blocks.admit(table, hashes[:3], 13)
    blocks.release(table)
    blocks.adopt(chain(PROMPTS[1])[:4], HOLD_S)
    assert len(blocks.located(hashes[:3])) == 2  # the end of the chain went first


def test_import_into_a_full_memory_keeps_a_valid_beginning() -> None:
    """An import takes the blocks that are free and stops, without a gap in the prefix."""
    blocks, hashes = KvBlocks(8, BLOCK), chain(PROMPTS[0])
    running = array("q")
    blocks.extend(running, 5 * BLOCK)
    assert list(blocks.adopt(hashes[:6], HOLD_S)) == [0, 1, 2]
    assert len(blocks.located(hashes)) == 3
    assert blocks.adopt(hashes[3:6], HOLD_S, parent=hashes[2]) == {}


def test_import_does_not_displace_the_beginning_of_its_own_prefix() -> None:
    """The destination keeps the oldest cached blocks if they begin the chain that it imports."""
    for holds in (True, False):
        blocks, hashes = KvBlocks(8, BLOCK), chain(PROMPTS[0])
        for prompt in (0, 1):
            table = array("q")
            blocks.admit(table, [], 16)
            blocks.confirm(table, chain(PROMPTS[prompt]), range(4))
            blocks.release(table)
        if holds:
            assert blocks.hold(hashes, HOLD_S) == 4
        blocks.adopt(hashes[4:8], HOLD_S, parent=hashes[3])
        assert (len(blocks.located(hashes)) == 8) is holds


def test_blocks_of_one_tenant_are_unknown_under_the_chain_of_another() -> None:
    """A worker that holds the prefix of a tenant holds none of it for another tenant."""
    blocks = KvBlocks(8, BLOCK)
    blocks.adopt(chain(PROMPTS[0], "a")[:6], HOLD_S)
    assert len(blocks.located(chain(PROMPTS[0], "a"))) == 6
    assert blocks.located(chain(PROMPTS[0], "b")) == []
    assert blocks.located(chain(PROMPTS[0])) == []
