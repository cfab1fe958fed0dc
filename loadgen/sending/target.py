"""The server under load: its address, and its properties before a run."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, Final

import aiohttp

from draftgate.loadgen.planning.corpus import TextCorpus
from draftgate.loadgen.sending.client import ClientTimeouts, OpenAIClient, first_model
from draftgate.loadgen.workloads.base import TokenEstimator

SAMPLES: Final = 8
SAMPLE_CHARACTERS: Final = 2000
"""Passages to count, half code and half prose. About 5,000 tokens give their ratio to characters
within a few per cent."""

INSPECT_TIMEOUT_S: Final = 30.0


@dataclass(frozen=True, slots=True)
class Target:
    """Where to send a load, and how.

    Attributes:
        model: the id of the model, or empty for the first that the server lists.
        verify: the number of responses to replay without speculation.
        events: the file for the run's events.
        processes: the number of sending processes. The plan does not depend on it.
    """

    url: str
    model: str = ""
    api_key: str = ""
    timeout_s: float = 300.0
    verify: int = 0
    events: Path | None = None
    processes: int = 1

    def client(self, session: aiohttp.ClientSession, model: str) -> OpenAIClient:
        """Return a client of that model with this target's time limits."""
        stall_s = min(self.timeout_s, ClientTimeouts().stall_s)
        return OpenAIClient(session, self.url, model, ClientTimeouts(self.timeout_s, stall_s))


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """The properties that a server reports.

    Attributes:
        max_model_len: the context in tokens, or None if not reported.
        version: empty if not reported.
        counter: an estimator measured with the server's `/tokenize`, or else unmeasured.
    """

    model: str
    max_model_len: int | None = None
    version: str = ""
    counter: TokenEstimator = field(default_factory=TokenEstimator)


async def inspect_server(
    session: aiohttp.ClientSession, url: str, model: str = "", corpus: TextCorpus | None = None
) -> ServerInfo:
    """Request the properties of a server.

    Args:
        model: the id of the model, or empty for the first that the server lists.
        corpus: the texts whose tokens the server counts, or None.

    Raises:
        aiohttp.ClientError, TimeoutError: the server cannot be reached.
        ValueError: the server lists no models.
    """
    async with asyncio.timeout(INSPECT_TIMEOUT_S):
        model = model or await first_model(session, url)
        version = (await _fetch(session, "GET", f"{url}/version") or {}).get("version")
        counted, max_model_len = list[tuple[str, int]](), None
        for text in samples(corpus) if corpus is not None else ():
            body = {"model": model, "prompt": text}
            reply = await _fetch(session, "POST", f"{url}/tokenize", body)
            if reply is None or not isinstance(reply.get("count"), int):
                break
            counted.append((text, reply["count"]))
            max_model_len = reply.get("max_model_len")
    return ServerInfo(
        model,
        max_model_len if isinstance(max_model_len, int) else None,
        version if isinstance(version, str) else "",
        TokenEstimator.measured(counted) if len(counted) == SAMPLES else TokenEstimator(),
    )


def samples(corpus: TextCorpus) -> Sequence[str]:
    """Return passages of code and of prose, always the same for one corpus."""
    rng = Random(0)
    libraries = [corpus.code, corpus.prose] * (SAMPLES // 2)
    return [library.read(library.random_position(rng), SAMPLE_CHARACTERS) for library in libraries]


async def _fetch(
    session: aiohttp.ClientSession, method: str, url: str, body: dict[str, Any] | None = None
) -> dict[str, Any] | None:
    """Return the JSON object of the server's response, or None."""
    async with session.request(method, url, json=body) as response:
        if response.status != 200:
            return None
        try:
            reply = await response.json(content_type=None)
        except ValueError:
            return None
        return reply if isinstance(reply, dict) else None
