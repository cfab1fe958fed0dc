"""Requests and responses of OpenAI chat completions, as every measured server uses them.

The responses have the same fields, and therefore the same size, as responses of Draftgate.
"""

from __future__ import annotations

from typing import Final

import msgspec

MODEL: Final = "mock"
KEY: Final = "sk-edge"
AUTHORIZATION: Final = f"Bearer {KEY}"
"""The key of all requests, which most servers ignore."""
PATH: Final = "/v1/chat/completions"
PACE: Final = "pace_ms="
"""A message `pace_ms=5` requests a chunk every 5 ms from the mock. The pace is in a message,
because proxies drop unknown fields and headers."""

_WORD: Final = " token"


class Message(msgspec.Struct):
    """A message of a chat."""

    content: str
    role: str = "user"


class ChatRequest(msgspec.Struct):
    """The request fields that the mock uses."""

    messages: list[Message]
    stream: bool | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None

    @property
    def tokens(self) -> int:
        """Number of requested tokens, equal to the number of chunks in a stream."""
        return self.max_tokens or self.max_completion_tokens or 1

    @property
    def pace_s(self) -> float:
        """Seconds between chunks, or 0 to send all chunks without delay."""
        content = self.messages[-1].content
        return float(content.removeprefix(PACE)) / 1e3 if content.startswith(PACE) else 0.0


decode: Final = msgspec.json.Decoder(ChatRequest).decode


def request_body(tokens: int, *, stream: bool, pace_ms: float = 0.0) -> bytes:
    """Return a request body as JSON."""
    content = f"{PACE}{pace_ms:g}" if pace_ms else "Say something."
    fields = {
        "model": MODEL,
        "messages": [{"role": "user", "content": content}],
        "max_tokens": tokens,
        "stream": stream,
    }
    return msgspec.json.encode(fields)


def chunk_head(request_id: str, created_s: int) -> bytes:
    """Return the common prefix of all chunks of a response."""
    return (
        f'data: {{"id":"chatcmpl-{request_id}","object":"chat.completion.chunk",'
        f'"created":{created_s},"model":"{MODEL}","choices":[{{"index":0,"delta":'
    ).encode()


FIRST: Final = f'{{"role":"assistant","content":"{_WORD}"}}'.encode()
NEXT: Final = f'{{"content":"{_WORD}"}}'.encode()
UNFINISHED: Final = b',"logprobs":null,"finish_reason":null}]}\n\n'
FINISHED: Final = b',"logprobs":null,"finish_reason":"length"}]}\n\n'
DONE: Final = b"data: [DONE]\n\n"


def full_response(request_id: str, created_s: int, tokens: int) -> bytes:
    """Return the JSON of a response without streaming."""
    usage = {"prompt_tokens": 8, "completion_tokens": tokens, "total_tokens": 8 + tokens}
    message = {"role": "assistant", "content": _WORD * tokens, "refusal": None}
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": "length"}
    response = {
        "id": f"chatcmpl-{request_id}",
        "object": "chat.completion",
        "created": created_s,
        "model": MODEL,
        "choices": [choice],
        "usage": usage,
    }
    return msgspec.json.encode(response)
