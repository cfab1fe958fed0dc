"""Replays a trace: prompts have the recorded lengths and share the recorded prefix blocks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Final

from draftgate.loadgen.planning.traces import TraceRow
from draftgate.loadgen.types import RequestSpec
from draftgate.loadgen.workloads.base import WorkloadSettings, cut

BLOCKS_KEPT: Final = 16_384
"""Texts of blocks in memory for rows that share them, about 30 MB at 512 tokens per block."""


class Replay:
    """The rows of a trace as requests to the completions endpoint.

    The text of a block depends on its id alone. Two prompts therefore agree through the leading
    blocks with equal ids, and then at most through the first digits of the differing ids. Text that
    no id covers is not shared. Lengths are exact to one token per block. A prompt that is too long
    for the server loses its end. `request` raises IndexError past the last row.
    """

    name = "trace"

    def __init__(self, rows: Sequence[TraceRow], settings: WorkloadSettings) -> None:
        self._rows = rows
        self._settings = settings
        self._block = lru_cache(maxsize=BLOCKS_KEPT)(self._write_block)

    def request(self, index: int) -> RequestSpec:
        row, settings = self._rows[index], self._settings
        answer = settings.answer_tokens(row.output_tokens)
        prompt = self._prompt(index, row, settings.prompt_tokens(row.prompt_tokens, answer))
        class_name = row.class_name or self.name
        return settings.spec(class_name, index, answer, prompt, tenant=row.tenant)

    def _prompt(self, index: int, row: TraceRow, tokens: int) -> str:
        settings, missing, pieces = self._settings, tokens, list[str]()
        for block in row.prefix_ids:
            if missing <= 0:
                break
            text = self._block(block, row.block_tokens)
            pieces.append(cut(text, missing, settings.counter))
            missing -= row.block_tokens
        if missing > 0:
            rng = settings.rng(self.name, "own", index)
            own = f"request {index}: {settings.text(settings.corpus.code, rng, missing)}"
            pieces.append(cut(own, missing, settings.counter))
        return "".join(pieces)

    def _write_block(self, block: int, tokens: int) -> str:
        settings = self._settings
        rng = settings.rng(self.name, "block", block)
        text = f"{block}: {settings.text(settings.corpus.code, rng, tokens)}"
        return cut(text, tokens, settings.counter)
