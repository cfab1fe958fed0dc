"""What a server tells of itself before a run: its model, its limits, how long its tokens are."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, Final

import aiohttp

from draftgate.loadgen.planning.corpus import TextCorpus
from draftgate.loadgen.sending.client import first_model
from draftgate.loadgen.workloads import ApproximateCounter, fit_counter

SAMPLES: Final = 8
SAMPLE_CHARACTERS: Final = 2000
"""Of these texts half are code and half prose: some 5,000 tokens, enough for their ratio to
characters within a few per cent."""

PATIENCE_S: Final = 30.0


@dataclass(frozen=True, slots=True)
class Server:
    """What was found out.

    Attributes:
        max_model_len: tokens of a sequence; None where the server does not tell.
        version: in its own words; empty where it does not tell.
        counter: measured with the server's `/tokenize` if it has one, else an estimate.
    """

    model: str
    max_model_len: int | None
    version: str
    counter: ApproximateCounter


async def look_at(
    session: aiohttp.ClientSession, url: str, model: str = "", corpus: TextCorpus | None = None
) -> Server:
    """Ask a server about itself.

    Args:
        model: if empty, the first that the server lists.
        corpus: of which texts the tokens are to be counted; None needs no counts.

    Raises:
        aiohttp.ClientError, TimeoutError: the server cannot be reached.
        ValueError: it lists no models.
    """
    async with asyncio.timeout(PATIENCE_S):
        model = model or await first_model(session, url)
        version = (await _told(session, "GET", f"{url}/version") or {}).get("version")
        counted, max_model_len = list[tuple[str, int]](), None
        for text in samples(corpus) if corpus is not None else ():
            body = {"model": model, "prompt": text}
            told = await _told(session, "POST", f"{url}/tokenize", body)
            if told is None or not isinstance(told.get("count"), int):
                break
            counted.append((text, told["count"]))
            max_model_len = told.get("max_model_len")
    return Server(
        model,
        max_model_len if isinstance(max_model_len, int) else None,
        version if isinstance(version, str) else "",
        fit_counter(counted) if len(counted) == SAMPLES else ApproximateCounter(),
    )


def samples(corpus: TextCorpus) -> Sequence[str]:
    """Return passages of code and of prose, the same for the same corpus."""
    rng = Random(0)
    libraries = [corpus.code, corpus.prose] * (SAMPLES // 2)
    return [library.read(library.place(rng), SAMPLE_CHARACTERS) for library in libraries]


async def _told(
    session: aiohttp.ClientSession, method: str, url: str, body: dict[str, Any] | None = None
) -> dict[str, Any] | None:
    """Return the JSON object that the server answers; None if it has no such thing."""
    async with session.request(method, url, json=body) as response:
        if response.status != 200:
            return None
        try:
            told = await response.json(content_type=None)
        except ValueError:
            return None
        return told if isinstance(told, dict) else None
