"""Replay: prompts as long as a trace's, sharing the blocks that its prompts shared."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Final, Protocol

from draftgate.loadgen.types import RequestSpec
from draftgate.loadgen.workloads.base import WorkloadSettings
from draftgate.loadgen.workloads.tokens import cut

BLOCKS_KEPT: Final = 16_384
"""Texts of blocks kept for the rows that share them: some 30 MB at 512 tokens a block."""


class Row(Protocol):
    """What a replay needs of a trace's row; `loadgen.planning.traces` reads such rows.

    `prefix_ids` name the prompt's blocks of `block_tokens` tokens, from its beginning; the last may
    be cut short by the prompt's end.
    """

    @property
    def prompt_tokens(self) -> int: ...
    @property
    def output_tokens(self) -> int: ...
    @property
    def prefix_ids(self) -> tuple[int, ...]: ...
    @property
    def block_tokens(self) -> int: ...
    @property
    def class_name(self) -> str: ...
    @property
    def tenant(self) -> str: ...


class Replay:
    """The rows of a trace as questions, at the completions endpoint.

    A block's text depends on its id alone, so two prompts agree through exactly the leading blocks
    whose ids agree, and then by no more than the first digits of the ids that differ. A row without
    ids, or what its ids do not cover, shares nothing. Lengths are right to one token per block by
    the counter; prompts too long for the server lose their ends. `question` raises IndexError past
    the last row.
    """

    name = "trace"

    def __init__(self, rows: Sequence[Row], setting: WorkloadSettings) -> None:
        self._rows = rows
        self._setting = setting
        self._block = lru_cache(maxsize=BLOCKS_KEPT)(self._written)

    def request(self, index: int) -> RequestSpec:
        row, setting = self._rows[index], self._setting
        answer = setting.answer_tokens(row.output_tokens)
        tokens = setting.prompt_tokens(row.prompt_tokens, answer)
        return RequestSpec(
            prompt=self._prompt(index, row, tokens),
            messages=(),
            max_tokens=answer,
            seed=setting.seed + index,
            class_name=row.class_name or self.name,
            tenant=row.tenant,
            slo=setting.slo,
        )

    def _prompt(self, index: int, row: Row, tokens: int) -> str:
        setting, missing, pieces = self._setting, tokens, list[str]()
        for block in row.prefix_ids:
            if missing <= 0:
                break
            text = self._block(block, row.block_tokens)
            pieces.append(cut(text, missing, setting.counter))
            missing -= row.block_tokens
        if missing > 0:
            rng = setting.rng(self.name, "own", index)
            own = f"request {index}: {setting.text(setting.corpus.code, rng, missing)}"
            pieces.append(cut(own, missing, setting.counter))
        return "".join(pieces)

    def _written(self, block: int, tokens: int) -> str:
        setting = self._setting
        rng = setting.rng(self.name, "block", block)
        text = f"{block}: {setting.text(setting.corpus.code, rng, tokens)}"
        return cut(text, tokens, setting.counter)
