"""`draftgate chat` and `draftgate run`, which talk to a model in a terminal or in a pipe.

Both are clients of a server: of one at an address, or of a node in this process. Defaults, limits
and errors are therefore those of the HTTP API.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Final

import typer

from draftgate.gateway.cli.api_client import Answer, ApiClient, Model, RequestFailed
from draftgate.gateway.cli.models import Place
from draftgate.gateway.cli.options import INTERRUPTED, fail

_PROMPT: Final = ">>> "
_RESTART: Final = "/new"
_LEAVE: Final = "/exit"
_HELP: Final = (
    f"Ctrl-C stops an answer, Ctrl-D or {_LEAVE} leaves, and {_RESTART} starts a new conversation."
)

_COMPLETION_TOKENS: Final = 128
"""Tokens of a completion without --max-tokens, because a text need not end."""

_CONTROLS: Final = dict.fromkeys([*range(9), 11, 12, *range(14, 32), *range(127, 160)])
"""Control characters, with which a text could change a terminal. Tabs and line ends stay."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """The sampling parameters of the command, or None for the defaults of the server."""

    max_tokens: int | None
    temperature: float | None
    seed: int | None

    def given(self) -> dict[str, Any]:
        """Return the fields of a request."""
        fields = {
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "seed": self.seed,
        }
        return {name: value for name, value in fields.items() if value is not None}


def run_prompt(
    place: Place, prompt: str, system: str | None, sampling: Sampling, *, raw: bool
) -> None:
    """Write one response to stdout, and a summary of it to stderr.

    Args:
        system: a system message, or None.
        raw: whether the model continues the text without its chat template.
    """
    text = _decoded(sys.stdin.buffer.read() if prompt == "-" else os.fsencode(prompt))
    with _connected(place) as (client, model):
        answer, begin_s = Answer(), time.perf_counter()
        if raw or not model.chats:
            if system is not None:
                raise RequestFailed("--system needs a model with a chat template, without --raw")
            body = {"prompt": text, "max_tokens": _COMPLETION_TOKENS, **sampling.given()}
            path = "completions"
        else:
            body = {"messages": [*_system(system), _message("user", text)], **sampling.given()}
            path = "chat/completions"
        for piece in client.stream(path, {"model": model.name, **body}, answer):
            _write(piece)
        seconds = time.perf_counter() - begin_s
        _write("\n")
        typer.echo(_summary(answer, seconds), err=True)


def run_chat(place: Place, system: str | None, sampling: Sampling) -> None:
    """Answer each line of stdin until it ends."""
    with _connected(place) as (client, model):
        if not model.chats:
            raise RequestFailed(
                f"{model.name} has no chat template; to continue a text, use: "
                f"draftgate run {model.name} TEXT"
            )
        body = {"model": model.name, **sampling.given()}
        if sys.stdin.isatty():
            typer.echo(f"Chat with {model.name}. {_HELP}", err=True)
        conversation = _Conversation(client, body, system)
        for line in _lines():
            if line == _RESTART:
                conversation.restart()
            elif line.strip():
                conversation.answer(line)


class _Conversation:
    """The messages of a chat, each of which the next request contains."""

    def __init__(self, client: ApiClient, body: Mapping[str, Any], system: str | None) -> None:
        self._client, self._body, self._system = client, body, system
        self._messages: list[dict[str, str]] = []
        self.restart()

    def restart(self) -> None:
        self._messages = _system(self._system)

    def answer(self, content: str) -> None:
        """Write the answer to a message.

        A message without an answer does not stay in the conversation. Of an answer that Ctrl-C
        stopped, the text so far stays.
        """
        asked, answer = [*self._messages, _message("user", content)], Answer()
        try:
            for piece in self._client.stream(
                "chat/completions", {**self._body, "messages": asked}, answer
            ):
                _write(piece)
        except KeyboardInterrupt:
            if not sys.stdin.isatty():
                raise
        except RequestFailed as error:
            typer.echo(f"draftgate: {error}", err=True)
        _write("\n")
        if answer.text:
            self._messages = [*asked, _message("assistant", answer.text)]


def _lines() -> Iterator[str]:
    """Yield the messages of the user. On a terminal, Ctrl-C discards a line."""
    if not sys.stdin.isatty():
        for line in sys.stdin.buffer:
            yield _decoded(line.rstrip(b"\r\n"))
        return
    with suppress(ImportError):
        import readline  # noqa: F401 - gives input() a history and keys to edit a line
    while True:
        try:
            line = input(_PROMPT)
        except KeyboardInterrupt:
            typer.echo()
            continue
        except EOFError:
            typer.echo()
            return
        if line == _LEAVE:
            return
        yield line


@contextmanager
def _connected(place: Place) -> Iterator[tuple[ApiClient, Model]]:
    """Connect to a server, or to a node that runs until the block ends.

    The process exits with status 1 and one line on stderr after an error, and with status 130 after
    Ctrl-C.
    """
    try:
        if place.url is not None:
            with closing(ApiClient(place.url, place.api_key)) as client:
                yield client, client.model(place.config.model)
        else:
            # Imported here because the import takes a second.
            from draftgate.gateway.cli.local_node import local_node

            with (
                local_node(place.config) as node,
                closing(ApiClient(node.url, node.api_key, local=True)) as client,
            ):
                yield client, client.model(None)
    except RequestFailed as error:
        fail(error)
    except BrokenPipeError:
        # The reader of stdout is gone. Python would fail again when it flushes stdout at the end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None


def _write(text: str) -> None:
    """Write text to stdout at once."""
    if sys.stdout.isatty():
        text = text.translate(_CONTROLS)
    sys.stdout.write(text)
    sys.stdout.flush()


def _decoded(text: bytes) -> str:
    """Return text decoded as UTF-8, independent of the locale.

    The process exits with status 1 if it is not valid.
    """
    try:
        return text.decode()
    except UnicodeError:
        fail("the prompt is not valid UTF-8")


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _system(content: str | None) -> list[dict[str, str]]:
    return [] if content is None else [_message("system", content)]


def _summary(answer: Answer, seconds: float) -> str:
    """Return the speed of an answer, and what speculation contributed to it."""
    speed = f"{answer.tokens} tokens, {answer.tokens / max(seconds, 1e-9):.1f} tok/s"
    found = answer.metrics.get("speculative_decoding")
    if not found:
        return speed
    steps, accepted = found["num_spec_steps"], found["num_accepted_tokens"]
    return (
        f"{speed}, {found['num_drafted_tokens']} drafted, {accepted} accepted, "
        f"{accepted / steps if steps else 0.0:.2f} accepted per step ({found['reason']})"
    )
