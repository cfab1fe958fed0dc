"""The server under load: where it is, and what it reports before a run."""

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
"""Half of these texts are code and half prose: some 5,000 tokens, enough for their ratio to
characters within a few per cent."""

INSPECT_TIMEOUT_S: Final = 30.0


@dataclass(frozen=True, slots=True)
class Target:
    """Where to send a load, and how.

    Attributes:
        model: if empty, the first that the server lists.
        verify: how many answers to replay without speculation.
        events: where to write the run's events.
        processes: how many processes send. The plan does not depend on it.
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
    """What a server reports about itself.

    Attributes:
        max_model_len: the context in tokens; None if the server does not report it.
        version: empty if the server does not report it.
        counter: measured with the server's `/tokenize` if it has one, else an estimate.
    """

    model: str
    max_model_len: int | None = None
    version: str = ""
    counter: TokenEstimator = field(default_factory=TokenEstimator)


async def inspect_server(
    session: aiohttp.ClientSession, url: str, model: str = "", corpus: TextCorpus | None = None
) -> ServerInfo:
    """Ask a server about itself.

    Args:
        model: if empty, the first that the server lists.
        corpus: the texts whose tokens are counted; None counts none.

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
    """Return passages of code and of prose, the same for the same corpus."""
    rng = Random(0)
    libraries = [corpus.code, corpus.prose] * (SAMPLES // 2)
    return [library.read(library.random_position(rng), SAMPLE_CHARACTERS) for library in libraries]


async def _fetch(
    session: aiohttp.ClientSession, method: str, url: str, body: dict[str, Any] | None = None
) -> dict[str, Any] | None:
    """Return the JSON object that the server answers; None if there is none."""
    async with session.request(method, url, json=body) as response:
        if response.status != 200:
            return None
        try:
            reply = await response.json(content_type=None)
        except ValueError:
            return None
        return reply if isinstance(reply, dict) else None
