"""Requests and answers of OpenAI's chat completions, as every server of the study uses them.

The answers have the fields, and therefore the size, of Draftgate's own.
"""

from __future__ import annotations

from typing import Final

import msgspec

MODEL: Final = "mock"
PATH: Final = "/v1/chat/completions"
PACE: Final = "pace_ms="
"""A message `pace_ms=5` asks the mock for a chunk every 5 ms. Proxies forward messages unchanged,
but drop unknown fields and headers."""

_WORD: Final = " token"


class Message(msgspec.Struct):
    """A message of a chat."""

    content: str
    role: str = "user"


class Asked(msgspec.Struct):
    """The fields of a request's body that the mock uses."""

    messages: list[Message]
    stream: bool | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None

    @property
    def tokens(self) -> int:
        """Number of requested tokens, which equals chunks in a stream."""
        return self.max_tokens or self.max_completion_tokens or 1

    @property
    def pace_s(self) -> float:
        """Seconds between chunks; 0 sends them at once."""
        content = self.messages[-1].content
        return float(content.removeprefix(PACE)) / 1e3 if content.startswith(PACE) else 0.0


decode: Final = msgspec.json.Decoder(Asked).decode


def body(tokens: int, *, stream: bool, pace_ms: float = 0.0) -> bytes:
    """Return the JSON of a request."""
    content = f"{PACE}{pace_ms:g}" if pace_ms else "Say something."
    asked = {
        "model": MODEL,
        "messages": [{"role": "user", "content": content}],
        "max_tokens": tokens,
        "stream": stream,
    }
    return msgspec.json.encode(asked)


def chunk_head(request_id: str, created_s: int) -> bytes:
    """Return the common beginning of all chunks of an answer."""
    return (
        f'data: {{"id":"chatcmpl-{request_id}","object":"chat.completion.chunk",'
        f'"created":{created_s},"model":"{MODEL}","choices":[{{"index":0,"delta":'
    ).encode()


FIRST: Final = f'{{"role":"assistant","content":"{_WORD}"}}'.encode()
NEXT: Final = f'{{"content":"{_WORD}"}}'.encode()
GOES_ON: Final = b',"logprobs":null,"finish_reason":null}]}\n\n'
ENDS: Final = b',"logprobs":null,"finish_reason":"length"}]}\n\n'
DONE: Final = b"data: [DONE]\n\n"


def whole(request_id: str, created_s: int, tokens: int) -> bytes:
    """Return the JSON of an answer without streaming."""
    usage = {"prompt_tokens": 8, "completion_tokens": tokens, "total_tokens": 8 + tokens}
    message = {"role": "assistant", "content": _WORD * tokens, "refusal": None}
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": "length"}
    answer = {
        "id": f"chatcmpl-{request_id}",
        "object": "chat.completion",
        "created": created_s,
        "model": MODEL,
        "choices": [choice],
        "usage": usage,
    }
    return msgspec.json.encode(answer)
