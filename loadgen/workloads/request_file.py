"""A workload from a file of requests, one JSON object per line.

    {"prompt": "def fibonacci(n):", "max_tokens": 32}
    {"messages": [{"role": "user", "content": "Why is the sky blue?"}], "temperature": 0.2}

A line has `prompt` or `messages`. `max_tokens`, `class`, `tenant` and `session` are optional. The
body of the request contains all other fields unchanged.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from msgspec import DecodeError, Struct, ValidationError, convert, field
from msgspec.json import decode

from draftgate.loadgen.types import ChatMessage, RequestSpec
from draftgate.loadgen.workloads.base import WorkloadSettings

MAX_TOKENS: Final = 64
"""Limit of a response if neither the line nor `--max-tokens` sets it."""

RESERVED: Final = frozenset({"model", "seed", "n", "stream", "stream_options"})
"""Fields that the load generator sets itself."""


class _Message(Struct, forbid_unknown_fields=True):
    role: str
    content: str


class _Line(Struct):
    prompt: str | None = None
    messages: list[_Message] | None = None
    max_tokens: int = MAX_TOKENS
    class_name: str = field(default="file", name="class")
    tenant: str = ""
    session: str = ""


class RequestFile:
    """The requests of a file in order, repeated from the first after the last.

    Raises:
        OSError: the file cannot be read.
        ValueError: a line is not a request, or the file has none. The message names file and line.
    """

    name = "file"

    def __init__(self, path: Path, settings: WorkloadSettings) -> None:
        lines = enumerate(path.read_bytes().splitlines(), 1)
        self._settings = settings
        self._requests = [
            _parse(line, f"{path}, line {number}", settings)
            for number, line in lines
            if line.strip()
        ]
        if not self._requests:
            raise ValueError(f"{path} has no requests")

    def request(self, index: int) -> RequestSpec:
        request = self._requests[index % len(self._requests)]
        return replace(request, seed=self._settings.seed + index)


def _parse(text: bytes, where: str, settings: WorkloadSettings) -> RequestSpec:
    try:
        fields: dict[str, Any] = decode(text, type=dict[str, Any])
        line = convert(fields, _Line)
    except (DecodeError, ValidationError) as error:
        raise ValueError(f"{where}: {error}") from None
    if (line.prompt is None) == (line.messages is None):
        raise ValueError(f"{where}: expected either `prompt` or `messages`")
    if line.max_tokens < 1:
        raise ValueError(f"{where}: max_tokens must be positive, not {line.max_tokens}")
    if reserved := RESERVED & fields.keys():
        raise ValueError(f"{where}: the load generator sets {', '.join(sorted(reserved))} itself")
    known = {"prompt", "messages", "max_tokens", "class", "tenant", "session"}
    return settings.spec(
        line.class_name,
        0,
        settings.answer_tokens(line.max_tokens),
        tuple(ChatMessage(m.role, m.content) for m in line.messages or ())
        if line.prompt is None
        else line.prompt,
        tenant=line.tenant,
        session=line.session,
        extra=tuple((name, value) for name, value in fields.items() if name not in known),
    )
