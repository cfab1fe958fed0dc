"""A strict streaming client of the OpenAI API."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import aiohttp

from loadgen.audit import StreamAudit, Verdict
from loadgen.sse import SseParser


@dataclass(frozen=True, slots=True)
class Question:
    """What to ask. `prompt` is sent as a text, or as a chat's only message.

    Attributes:
        extra: further fields of the request's body, as they are.
    """

    prompt: str
    max_tokens: int
    seed: int
    chat: bool = False
    n: int = 1
    extra: tuple[tuple[str, Any], ...] = ()

    def body(self, model: str) -> dict[str, Any]:
        """Return the request's body."""
        message = {"role": "user", "content": self.prompt}
        return {
            "model": model,
            **({"messages": [message]} if self.chat else {"prompt": self.prompt}),
            "max_tokens": self.max_tokens,
            "seed": self.seed,
            "n": self.n,
            "stream": True,
            "stream_options": {"include_usage": True},
            **dict(self.extra),
        }


@dataclass(frozen=True, slots=True)
class Record:
    """What became of one request. Instants are of the monotonic clock.

    Attributes:
        scheduled_s: when it was meant to be sent: latencies count from here.
        first_s, last_s: arrival of the first and the last delta with text; None if there was none.
        end_s: when it was over.
        texts: text by choice.
        usage, metrics: what the server reported, if it did.
    """

    scheduled_s: float
    first_s: float | None
    last_s: float | None
    end_s: float
    verdict: Verdict
    detail: str
    texts: tuple[str, ...] = ()
    usage: dict[str, Any] | None = None
    metrics: dict[str, Any] | None = None

    @property
    def completion_tokens(self) -> int | None:
        """Tokens generated, as the server counts them."""
        tokens = (self.usage or {}).get("completion_tokens")
        return tokens if isinstance(tokens, int) else None

    @property
    def latency_s(self) -> float:
        """From the scheduled instant to the end."""
        return self.end_s - self.scheduled_s

    @property
    def ttft_s(self) -> float | None:
        """From the scheduled instant to the first text."""
        return None if self.first_s is None else self.first_s - self.scheduled_s

    @property
    def tpot_s(self) -> float | None:
        """`(last - first) / (n - 1)` over the n tokens; None below two tokens."""
        tokens = self.completion_tokens
        if self.first_s is None or self.last_s is None or tokens is None or tokens < 2:
            return None
        return (self.last_s - self.first_s) / (tokens - 1)


async def first_model(session: aiohttp.ClientSession, url: str) -> str:
    """Return the id of the first model the server lists.

    Raises:
        aiohttp.ClientError: the server cannot be reached, or refuses.
        ValueError: it lists none.
    """
    async with session.get(f"{url}/v1/models") as response:
        response.raise_for_status()
        listed = (await response.json()).get("data") or []
    if not listed:
        raise ValueError(f"{url} lists no models")
    return str(listed[0]["id"])


async def ask(
    session: aiohttp.ClientSession,
    url: str,
    model: str,
    question: Question,
    scheduled_s: float | None = None,
) -> Record:
    """Ask, read the stream to its end, and judge it. Never raises for what a server does."""
    stream = _Stream(question, time.monotonic() if scheduled_s is None else scheduled_s)
    path = "/v1/chat/completions" if question.chat else "/v1/completions"
    try:
        async with session.post(url + path, json=question.body(model)) as response:
            await stream.read(response)
    except TimeoutError:
        stream.audit.fault(Verdict.TIMEOUT, "no answer within the time allowed")
    except aiohttp.ClientError as error:
        stream.audit.fault(Verdict.NO_CONNECTION, f"{type(error).__name__}: {error}")
    return stream.record()


class _Stream:
    """A response under way: its bytes through the parser to the audit, with the instants."""

    def __init__(self, question: Question, scheduled_s: float) -> None:
        self.audit = StreamAudit(question.n)
        self._scheduled_s = scheduled_s
        self._first_s: float | None = None
        self._last_s: float | None = None

    async def read(self, response: aiohttp.ClientResponse) -> None:
        """Read a response to its end."""
        if response.status != 200:
            detail = f"{response.status}: {(await response.text(errors='replace'))[:200]}"
            self.audit.fault(Verdict.HTTP_STATUS, detail)
        elif response.content_type != "text/event-stream":
            detail = f"not text/event-stream but {response.content_type}"
            self.audit.fault(Verdict.NO_STREAM, detail)
        else:
            await self._read_events(response)

    def record(self) -> Record:
        """Return what became of it."""
        audit = self.audit
        return Record(
            self._scheduled_s,
            self._first_s,
            self._last_s,
            time.monotonic(),
            audit.verdict,
            audit.detail,
            tuple(audit.texts[index] for index in sorted(audit.texts)),
            audit.usage,
            audit.metrics,
        )

    async def _read_events(self, response: aiohttp.ClientResponse) -> None:
        parser = SseParser()
        try:
            async for chunk in response.content.iter_any():
                now_s = time.monotonic()
                brought_text = [self.audit.add(event.data) for event in parser.feed(chunk)]
                if any(brought_text):
                    self._first_s = now_s if self._first_s is None else self._first_s
                    self._last_s = now_s
        except (aiohttp.ClientPayloadError, aiohttp.ClientConnectionError) as error:
            self.audit.end(cut=f"{type(error).__name__}: {error}")
        else:
            self.audit.end()
