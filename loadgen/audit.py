"""Was a stream intact? Sans-I/O.

An intact stream gives every choice exactly one `finish_reason` and nothing behind it, the usage
once if it was asked for, then `[DONE]`, then nothing. Everything else is a failure, however much
text came before: a generator which counts cut streams as successes measures nothing.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

DONE: Final = "[DONE]"


class Verdict(StrEnum):
    """What became of a request: `OK`, or the first thing that went wrong."""

    OK = "ok"
    NO_CONNECTION = "no_connection"
    TIMEOUT = "timeout"
    HTTP_STATUS = "http_status"
    NO_STREAM = "no_stream"
    CUT = "cut"
    ERROR_EVENT = "error_event"
    MALFORMED = "malformed"
    NO_FINISH_REASON = "no_finish_reason"
    AFTER_FINISH = "after_finish"
    NO_USAGE = "no_usage"
    NO_DONE = "no_done"
    AFTER_DONE = "after_done"


@dataclass(slots=True)
class StreamAudit:
    """Follows one stream of `/v1/completions` or `/v1/chat/completions`.

    Attributes:
        choices: how many were asked for.
        wants_usage: whether `stream_options.include_usage` was set.
        verdict: the first fault so far; final after `end`.
        detail: the fault in words.
        texts: text by choice.
        usage, metrics: what the server reported, if it did.
    """

    choices: int = 1
    wants_usage: bool = True
    verdict: Verdict = Verdict.OK
    detail: str = ""
    texts: dict[int, str] = field(default_factory=dict)
    finish_reasons: dict[int, str] = field(default_factory=dict)
    usage: dict[str, Any] | None = None
    metrics: dict[str, Any] | None = None
    _done: bool = False

    def add(self, data: str) -> bool:
        """Take the data of an event; return whether it brought text."""
        if self._done:
            self.fault(Verdict.AFTER_DONE, f"after [DONE] came {data[:80]!r}")
        elif data == DONE:
            self._done = True
        else:
            return self._chunk(data)
        return False

    def end(self, *, cut: str | None = None) -> None:
        """Conclude: the connection ended, in order or with the error `cut`."""
        missing = [i for i in range(self.choices) if i not in self.finish_reasons]
        if cut is not None:
            self.fault(Verdict.CUT, cut)
        if missing:
            self.fault(Verdict.NO_FINISH_REASON, f"choices without a finish_reason: {missing}")
        if self.wants_usage and self.usage is None:
            self.fault(Verdict.NO_USAGE, "usage was asked for and did not come")
        if not self._done:
            self.fault(Verdict.NO_DONE, "the stream ended without [DONE]")

    def fault(self, verdict: Verdict, detail: str) -> None:
        """Record a fault; the first one stands."""
        if self.verdict is Verdict.OK:
            self.verdict, self.detail = verdict, detail

    def _chunk(self, data: str) -> bool:
        try:
            chunk = json.loads(data)
            if "error" in chunk:
                self.fault(Verdict.ERROR_EVENT, _message(chunk["error"]))
                return False
            brought_text = [self._choice(choice) for choice in chunk["choices"]]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            fault = f"{type(error).__name__}: {error} in {data[:80]!r}"
            self.fault(Verdict.MALFORMED, fault)
            return False
        if chunk.get("usage") is not None:
            self.usage = chunk["usage"]
        if chunk.get("metrics") is not None:
            self.metrics = chunk["metrics"]
        return any(brought_text)

    def _choice(self, choice: dict[str, Any]) -> bool:
        """Take one choice of a chunk: `text` of a completion, or `delta` of a chat."""
        index, reason = choice["index"], choice.get("finish_reason")
        text = choice["text"] if "text" in choice else choice["delta"].get("content") or ""
        if not (isinstance(index, int) and 0 <= index < self.choices):
            raise ValueError(f"choice {index!r} of {self.choices}")
        if index in self.finish_reasons and (text or reason):
            self.fault(Verdict.AFTER_FINISH, f"choice {index} went on after its finish_reason")
        if reason is not None:
            self.finish_reasons[index] = reason
        self.texts[index] = self.texts.get(index, "") + text
        return bool(text)


def _message(error: Any) -> str:
    return str(error.get("message", error)) if isinstance(error, dict) else str(error)
