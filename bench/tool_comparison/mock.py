"""A server that behaves as a `Case` prescribes, and reports its actions at `GET /truth`.

    python -m bench.tool_comparison.mock CASE --port PORT

Times are from the server's monotonic clock, taken just before each write to the socket.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import time
from dataclasses import asdict, dataclass
from typing import Any, Final

import uvloop
from aiohttp import web

from bench.tool_comparison.cases import CASES, STALL_AT, Case

MODEL: Final = "mock"
WORD: Final = " return"
"""A text that is a single token of the shipped model, so that tools that count tokens agree."""

_STREAM: Final = {"Content-Type": "text/event-stream; charset=utf-8"}


@dataclass(slots=True)
class ResponseRecord:
    """The actions for a single request, in seconds of this process's clock."""

    arrived_s: float
    first_s: float = math.nan
    last_s: float = math.nan
    end_s: float = math.nan
    tokens: int = 0
    intact: bool = False


class Mock:
    """The server of a case."""

    def __init__(self, case: Case) -> None:
        self._case = case
        self._records: list[ResponseRecord] = []

    def application(self) -> web.Application:
        """Return the application with the routes that the tools use."""
        app = web.Application()
        app.router.add_post("/v1/chat/completions", self._answer)
        app.router.add_post("/v1/completions", self._answer)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/health", self._health)
        app.router.add_get("/truth", self._truth)
        return app

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": MODEL, "root": MODEL}]})

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response()

    async def _truth(self, _: web.Request) -> web.Response:
        return web.json_response([asdict(answer) for answer in self._records])

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        record = ResponseRecord(time.monotonic())
        self._records.append(record)
        body = await request.json()
        response = web.StreamResponse(headers=_STREAM)
        await response.prepare(request)
        await self._stream(response, record, f"mock-{len(self._records)}", body)
        record.end_s = time.monotonic()
        await response.write_eof()
        return response

    async def _stream(
        self,
        response: web.StreamResponse,
        record: ResponseRecord,
        answer_id: str,
        body: dict[str, Any],
    ) -> None:
        case = self._case
        last = case.tokens if case.broken_after is None else case.broken_after
        form = _text if "prompt" in body else _delta

        async def write(text: str | None, reason: str | None = None) -> None:
            choice = {"index": 0, **form(text), "finish_reason": reason}
            await response.write(_event(answer_id, choices=[choice]))

        if form is _delta:
            role = {"index": 0, "delta": {"role": "assistant", "content": ""}}
            await response.write(_event(answer_id, choices=[role]))
        if case.hollow:
            await write("")
        for before in range(0, last, case.per_chunk):
            count = min(case.per_chunk, last - before)
            due_s = record.arrived_s + case.ttft_s + before * case.token_s
            await self._wait_until(due_s)
            record.last_s = time.monotonic()
            if before == 0:
                record.first_s = record.last_s
            await write(WORD * count)
            record.tokens += count
        if case.broken_after is not None:
            if case.error:
                await response.write(_data({"error": {"message": "worker died", "code": 500}}))
                await response.write(b"data: [DONE]\n\n")
            return
        await write(None, "length")
        await response.write(_event(answer_id, choices=[], usage=_usage(case.tokens)))
        await response.write(b"data: [DONE]\n\n")
        record.intact = True

    async def _wait_until(self, due_s: float) -> None:
        """Wait until a time, or until the end of a stall that covers this time."""
        await asyncio.sleep(max(0.0, due_s - time.monotonic()))
        if self._case.stall_s and len(self._records) > STALL_AT:
            ends_s = self._records[STALL_AT].arrived_s + self._case.stall_s
            await asyncio.sleep(max(0.0, ends_s - time.monotonic()))


def _delta(text: str | None) -> dict[str, object]:
    return {"delta": {} if text is None else {"content": text}}


def _text(text: str | None) -> dict[str, object]:
    return {"text": text or ""}


def _usage(tokens: int) -> dict[str, int]:
    return {"prompt_tokens": 64, "completion_tokens": tokens, "total_tokens": 64 + tokens}


def _event(answer_id: str, **fields: object) -> bytes:
    head = {"id": answer_id, "object": "chat.completion.chunk", "created": 0, "model": MODEL}
    return _data({**head, **fields})


def _data(content: object) -> bytes:
    return b"data: " + json.dumps(content).encode() + b"\n\n"


def main() -> None:
    """Serve a case on the loopback interface."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("case", choices=CASES)
    parser.add_argument("--port", type=int, required=True)
    args = parser.parse_args()
    mock = Mock(CASES[args.case])
    web.run_app(
        mock.application(),
        host="127.0.0.1",
        port=args.port,
        print=lambda *_: None,
        access_log=None,
        loop=uvloop.new_event_loop(),
    )


if __name__ == "__main__":
    main()
