"""A client of the OpenAI API for `chat` and `run`, and the query of `explain` and `usage`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, Final, TypeVar

import httpx
import msgspec

from draftgate.addresses import mask_url
from draftgate.loadgen.sending.sse import SseParser

_CONNECT_S: Final = 10.0
"""Time limit for a connection, in seconds. Responses have none, because a prompt may be long."""

FETCH_S: Final = 30.0
"""Time limit for the response to a query, in seconds."""

NEEDS_KEY: Final = "requires an API key: pass --api-key or set OPENAI_API_KEY"

Reply = TypeVar("Reply", bound=msgspec.Struct)


class RequestFailed(Exception):
    """A server refused a request, or cannot be reached.

    The message is one line for the user.
    """


@dataclass(frozen=True, slots=True)
class Model:
    """A model of a server.

    Attributes:
        chats: whether it has a chat template. True for a server that does not say.
    """

    name: str
    chats: bool


@dataclass(slots=True)
class Answer:
    """A streamed response, whose fields are complete at the end of the stream.

    Attributes:
        text: the text so far.
        metrics: the metrics of the response, if the server sends any.
        tokens: the number of output tokens.
    """

    text: str = ""
    metrics: Mapping[str, Any] = field(default_factory=dict)
    tokens: int = 0


class ApiClient:
    """A connection to a server."""

    def __init__(self, url: str, api_key: str, *, local: bool = False) -> None:
        """Prepare the connection.

        Args:
            url: an address of `read_server_url`.
            api_key: the key, or an empty string.
            local: whether the server is in this process, which no proxy reaches.
        """
        self._url = url
        self._http = httpx.Client(
            headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
            timeout=httpx.Timeout(None, connect=_CONNECT_S),
            trust_env=not local,
        )

    def close(self) -> None:
        """Close the connection."""
        self._http.close()

    def model(self, name: str | None) -> Model:
        """Return a model of the server, or its first one without a name.

        Raises:
            RequestFailed: the server does not have it, or cannot be reached.
        """
        try:
            response = self._http.get(f"{self._url}/v1/models")
        except httpx.HTTPError as error:
            raise self._unreachable(error) from None
        if response.status_code != HTTPStatus.OK:
            raise self._refused(response.status_code, response.content)
        entries = {entry["id"]: entry for entry in response.json()["data"]}
        found = next(iter(entries), "") if name is None else name
        if found not in entries:
            known = ", ".join(entries) or "none"
            raise RequestFailed(f"{mask_url(self._url)} does not serve {name}; its models: {known}")
        return Model(found, entries[found].get("chat", True))

    def stream(self, path: str, body: Mapping[str, Any], answer: Answer) -> Iterator[str]:
        """Yield the pieces of a streamed response, and fill the answer.

        Raises:
            RequestFailed: the server refused the request, or the stream broke.
        """
        body = {**body, "stream": True, "stream_options": {"include_usage": True}}
        try:
            with self._http.stream("POST", f"{self._url}/v1/{path}", json=body) as response:
                if response.status_code != HTTPStatus.OK:
                    raise self._refused(response.status_code, response.read())
                parser = SseParser()
                for chunk in response.iter_bytes():
                    for event in parser.feed(chunk):
                        if event.data != b"[DONE]":
                            yield self._piece(event.data, answer)
        except httpx.HTTPError as error:
            raise self._unreachable(error) from None

    def _piece(self, data: bytes, answer: Answer) -> str:
        """Return the text that an event of a stream adds."""
        event = json.loads(data)
        if "error" in event:
            raise self._refused(HTTPStatus.OK, data)
        answer.metrics = event.get("metrics") or answer.metrics
        answer.tokens = (event.get("usage") or {}).get("completion_tokens", answer.tokens)
        text = ""
        for choice in event.get("choices", ()):
            delta = choice.get("delta")
            text += (choice.get("text") if delta is None else delta.get("content")) or ""
        answer.text += text
        return text

    def _refused(self, status: int, body: bytes) -> RequestFailed:
        shown = mask_url(self._url)
        if status == HTTPStatus.UNAUTHORIZED:
            return RequestFailed(f"{shown} {NEEDS_KEY}")
        return RequestFailed(error_message(body) or f"{shown} responded with status {status}")

    def _unreachable(self, error: Exception) -> RequestFailed:
        return RequestFailed(f"cannot reach {mask_url(self._url)}: {error}")


def error_message(body: bytes) -> str | None:
    """Return the message of an error response in OpenAI's format, or None for another body."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return None


def fetch(
    address: str,
    path: str,
    reply: type[Reply],
    api_key: str,
    query: Mapping[str, str] | None = None,
) -> Reply:
    """Return what an endpoint of a server responds.

    Args:
        api_key: the key, or an empty text.

    Raises:
        OSError: the server does not respond, needs a key, or refuses the query.
        ValueError: the server has no such endpoint.
    """
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    shown = mask_url(address)
    try:
        answer = httpx.get(f"{address}{path}", params=query, headers=headers, timeout=FETCH_S)
    except httpx.HTTPError as error:
        raise OSError(f"cannot reach {shown}: {error}") from None
    if answer.status_code == HTTPStatus.UNAUTHORIZED and not api_key:
        raise OSError(f"{shown} {NEEDS_KEY}")
    if answer.is_error and (message := error_message(answer.content)) is not None:
        raise OSError(f"{shown} refuses the query: {message}")
    try:
        return msgspec.json.decode(answer.content, type=reply)
    except msgspec.MsgspecError:
        status = answer.status_code
        raise ValueError(f"{shown} has no {path}: it responded with status {status}") from None
