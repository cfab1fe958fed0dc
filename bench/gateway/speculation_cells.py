"""The cells of `draftgate bench speculation`: outputs, texts, numbers of streams and requests."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import cycle, islice, product
from math import ceil, sqrt
from typing import Final, NamedTuple

from draftgate.loadgen.planning.corpus import Document, TextCorpus, docstrings
from draftgate.loadgen.planning.pairs import source_pairs
from draftgate.loadgen.types import PlannedRequest, RequestSpec
from draftgate.loadgen.workloads.base import TokenEstimator, WorkloadSettings, to_endpoint
from draftgate.loadgen.workloads.rag import Rag
from training.corpus import held_out_files, load

SAMPLED: Final = "sampled"
BEFORE_LOOPS: Final = "before_loops"
LOOPS: Final = "loops"
OUTPUTS: Final = (SAMPLED, BEFORE_LOOPS, LOOPS)
"""Kinds of outputs: sampled at `TEMPERATURE`, greedy up to the start of a loop, and whole greedy
outputs that end in a loop."""

TEXTS: Final = ("code", "prose", "retrieval")
STREAMS: Final = (1, 4, 16, 64)
TEMPERATURE: Final = 0.8

ANSWER_TOKENS: Final = 64
LOOP_TOKENS: Final = 96
"""Output tokens of a request, and of a greedy request that loops. A round of a cell then takes
about a second with `off`. One round of all cells and six policies takes about five minutes (Zen 4,
2026-11-22)."""

LEAST_TOKENS: Final = 24
"""Least number of tokens before a loop. A shorter output is nearly all overhead."""

PROMPT_TOKENS: Final = (40, 240)
CONTEXT_TOKENS: Final = 800
"""Context that retrieval fills: five passages of about a hundred tokens. Five passages of 256
tokens would take ten minutes of prefill for all servers."""

CHARACTERS_PER_TOKEN: Final = 3.1


class Cell(NamedTuple):
    """A combination of outputs, text and number of concurrent streams."""

    outputs: str
    text: str
    streams: int

    @property
    def temperature(self) -> float:
        """Temperature of the requests."""
        return TEMPERATURE if self.outputs == SAMPLED else 0.0


class Prompt(NamedTuple):
    """A prompt, and the number of tokens to generate."""

    text: str
    max_tokens: int = ANSWER_TOKENS


Pools = dict[tuple[str, str], list[Prompt]]
"""The prompts by outputs and text. A pool is empty if no output is of this kind."""


def all_cells(
    outputs: Sequence[str], texts: Sequence[str], streams: Sequence[int], pools: Pools
) -> list[Cell]:
    """Return every cell for which prompts exist."""
    cells = (Cell(*parts) for parts in product(outputs, texts, streams))
    return [cell for cell in cells if pools[cell.outputs, cell.text]]


def held_out_prompts(text: str, count: int, seed: int) -> list[str]:
    """Return prompts of held-out code, of its docstrings, or of questions about both.

    Args:
        text: a kind of `TEXTS`.
    """
    settings = WorkloadSettings(
        seed,
        TokenEstimator(CHARACTERS_PER_TOKEN, "the shipped model's vocabulary on code"),
        _corpus(),
        ANSWER_TOKENS,
        CONTEXT_TOKENS,
    )
    if text == "retrieval":
        rag = Rag(settings)
        asked = (to_endpoint(rag.request(index), "completions") for index in range(count))
        return [request.prompt or "" for request in asked]
    library = settings.corpus.code if text == "code" else settings.corpus.prose
    rngs = [settings.rng(text, index) for index in range(count)]
    return [settings.text(library, rng, rng.randint(*PROMPT_TOKENS)) for rng in rngs]


@cache
def _corpus() -> TextCorpus:
    code = load(held_out_files())
    prose = [text for text in map(docstrings, code) if text]

    def library(texts: Sequence[str]) -> list[Document]:
        return [Document(f"{i:04}", len(t), lambda t=t: t) for i, t in enumerate(texts)]  # type: ignore[misc]

    return TextCorpus(
        "held-out files", lambda: library(code), lambda: library(prose), lambda: source_pairs(code)
    )


def greedy_pools(prompts: Sequence[str], loop_starts: Sequence[int]) -> dict[str, list[Prompt]]:
    """Return the greedy prompts by outputs: outputs cut at their loop, and outputs with a loop.

    Args:
        loop_starts: tokens before the loop in `LOOP_TOKENS` tokens of each greedy output.
    """
    found = list(zip(prompts, loop_starts, strict=True))
    return {
        BEFORE_LOOPS: [
            Prompt(text, min(start, ANSWER_TOKENS))
            for text, start in found
            if start >= LEAST_TOKENS
        ],
        LOOPS: [Prompt(text, LOOP_TOKENS) for text, start in found if start <= LOOP_TOKENS // 2],
    }


def requests_of(cell: Cell, prompts: Sequence[Prompt], seed: int = 0) -> list[PlannedRequest]:
    """Return the requests of a cell, which repeat the prompts if the cell needs more.

    A cell of n streams has 8 sqrt(n) requests, so that cells take about the same time, and at least
    one request per stream.
    """
    count = max(cell.streams, ceil(8 * sqrt(cell.streams)))
    chosen = islice(cycle(prompts), count)
    return [planned(index, one, cell.temperature, seed) for index, one in enumerate(chosen)]


def planned(index: int, prompt: Prompt, temperature: float, seed: int = 0) -> PlannedRequest:
    """Return a request of a closed loop."""
    extra = (("temperature", temperature), ("ignore_eos", True))
    request = RequestSpec(prompt.text, (), prompt.max_tokens, seed + index, extra=extra)
    return PlannedRequest(index, None, request)


def unstreamed(prompt: Prompt, model: str) -> dict[str, object]:
    """Return the body of a greedy request whose response lists its tokens."""
    body = planned(0, prompt, 0.0).request.body(model)
    del body["stream_options"]
    return body | {"stream": False, "logprobs": 0, "speculation": {"mode": "off"}}
