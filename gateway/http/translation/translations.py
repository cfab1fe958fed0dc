"""Translations of requests to chats, and of the responses of chats back.

A translation belongs to one request. An upstream with the endpoint of the request gets the request
as it is. Each other upstream gets a chat. The writers of this node's own engine write the response,
so that clients get the same events from both.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import ClassVar, Final

import msgspec
from msgspec import UNSET

from draftgate.backends.errors import UpstreamFailed
from draftgate.backends.openai.continuation import CHATS, TOKENIZE
from draftgate.backends.openai.events import data_of_each
from draftgate.backends.sampling_params import SamplingParams
from draftgate.gateway.dispatch.upstreams.error_bodies import is_missing_endpoint, read_error
from draftgate.gateway.errors import GatewayError, NotOffered, Unsupported
from draftgate.gateway.http.replies.anthropic import MessageRendering, MessageWriter
from draftgate.gateway.http.replies.anthropic_shapes import MessageTokensReply
from draftgate.gateway.http.replies.metric_shapes import OptionalMetrics
from draftgate.gateway.http.replies.rendering import COMMENT, ReplyWriter, encode
from draftgate.gateway.http.replies.responses import ResponseWriter
from draftgate.gateway.http.replies.shapes import InputTokensReply, OptionalUsage
from draftgate.gateway.http.requests import anthropic, responses
from draftgate.gateway.http.requests.anthropic import read_count_tokens, read_messages
from draftgate.gateway.http.requests.decoding import client_name
from draftgate.gateway.http.requests.responses import LOGPROBS, ResponsesBody, read_responses
from draftgate.gateway.http.requests.schemas import ChatBody
from draftgate.gateway.http.translation.chat_bodies import chat_body, tokenize_body
from draftgate.gateway.http.translation.chunks import Chunk, ChunkReader
from draftgate.gateway.offload import offload

CONVERTED_INLINE_BYTES: Final = 32 << 10
"""Larger bodies are translated in a thread, because no callback may hold the event loop for longer
than 5 ms."""

_ONLY_CHATS: Final = "the upstream has only chats"


class Translation:
    """A request that an upstream without its endpoint gets in another form.

    Implements `draftgate.backends.base.CallTranslation`.

    Attributes:
        path: the path of the other endpoint.
    """

    path: ClassVar[str]
    _params: ClassVar[Mapping[str, str]]

    def __init__(self, own_path: str, body: bytes) -> None:
        """Keep a request, which is read only if an upstream needs another one.

        Args:
            own_path: the path of the request.
        """
        self._own_path = own_path
        self._body = body
        self._chat: ChatBody | None = None
        self._names: Mapping[str, str] = {}

    def is_missing(self, status: int, body: bytes) -> bool:
        """Return whether a response means that the upstream does not have the endpoint."""
        return is_missing_endpoint(status, read_error(body), self._own_path)

    async def translate(self, model: str, *, continuous_usage: bool) -> bytes:
        """Return the body of the other request.

        Args:
            model: the upstream's name of the model.
            continuous_usage: whether the upstream can report the usage in each chunk.

        Raises:
            InvalidRequest: the request is malformed, or cannot be translated.
        """
        if len(self._body) <= CONVERTED_INLINE_BYTES:
            return self._encode(model, continuous_usage=continuous_usage)
        return await offload(self._encode, model, continuous_usage=continuous_usage)

    def convert(self, body: bytes) -> bytes:
        """Return the whole response for the client.

        Raises:
            UpstreamFailed, GatewayError: the upstream's response has another form.
        """
        raise NotImplementedError

    def read_events(self, events: bytes) -> bytes:
        """Return the client's events for complete events of the upstream, possibly none.

        Raises:
            UpstreamFailed, GatewayError: an event has another form, or is an error.
        """
        raise NotImplementedError

    def end_events(self) -> bytes:
        """Return the events after those of a complete stream.

        Raises:
            UpstreamFailed, GatewayError: as in `read_events`.
        """
        raise NotImplementedError

    def name_param(self, param: str) -> str:
        """Return the client's name of a parameter of a chat."""
        return client_name(param, {**self._params, **self._names}) or param

    def _encode(self, model: str, *, continuous_usage: bool) -> bytes:
        raise NotImplementedError

    def _read(self) -> tuple[ChatBody, Mapping[str, str]]:
        """Return the chat of the request, and the client's names of its parameters."""
        raise NotImplementedError

    def _read_chat(self) -> ChatBody:
        if self._chat is None:
            self._chat, self._names = self._read()
        return self._chat


class TokenCount(Translation):
    """A count of the tokens of a prompt, for which an upstream gets the prompt of a chat."""

    path = TOKENIZE

    def convert(self, body: bytes) -> bytes:
        """Return the count in the client's form, as `Translation.convert` describes."""
        try:
            count = msgspec.json.decode(body, type=_Tokenized).count
        except (ValueError, RecursionError):
            raise NotOffered("the upstream cannot count the tokens of chats") from None
        return encode(self._reply(count))

    def _encode(self, model: str, *, continuous_usage: bool) -> bytes:
        return tokenize_body(self._read_chat(), model)

    def _reply(self, count: int) -> msgspec.Struct:
        raise NotImplementedError


class _Tokenized(msgspec.Struct):
    count: int


class MessageTokenCount(TokenCount):
    """A request to `/v1/messages/count_tokens`."""

    _params = anthropic.PARAMS

    def _read(self) -> tuple[ChatBody, Mapping[str, str]]:
        return read_count_tokens(self._body)

    def _reply(self, count: int) -> msgspec.Struct:
        return MessageTokensReply(count)


class InputTokenCount(TokenCount):
    """A request to `/v1/responses/input_tokens`."""

    _params = responses.PARAMS

    def _read(self) -> tuple[ChatBody, Mapping[str, str]]:
        wire, chat, names = read_responses(self._body)
        _check_previous(wire)
        return chat, names

    def _reply(self, count: int) -> msgspec.Struct:
        return InputTokensReply(count)


class ChatTranslation(Translation):
    """A request that generates text, whose response may be a stream."""

    path = CHATS
    heartbeat: ClassVar[bytes] = COMMENT
    """The event that tells the client that the upstream still works."""

    def __init__(
        self,
        own_path: str,
        body: bytes,
        request_id: str,
        failure: Callable[[GatewayError, str], bytes],
    ) -> None:
        """Keep a request, as `Translation` does.

        Args:
            request_id: the id from which those of the response are made.
            failure: a function that renders an error of a stream that is not translated.
        """
        super().__init__(own_path, body)
        self._request_id = request_id
        self._failure = failure
        self._writer: ReplyWriter  # once the request has been read
        self._has_begun = False
        self._error: Exception | None = None  # raised once the events before it have been sent
        self._chunks = ChunkReader()
        self._usage: OptionalUsage = UNSET
        self._metrics: OptionalMetrics = UNSET

    def convert(self, body: bytes) -> bytes:
        """Return a whole response, as `Translation.convert` describes."""
        chunk = self._chunks.read(body)
        if chunk.error is not None:
            raise chunk.error
        if chunk.finish is None:
            raise UpstreamFailed("its response has no finished choice")
        self._note(chunk)
        self._writer.add(chunk.output)
        return self._writer.whole(self._usage, self._metrics)

    def read_events(self, events: bytes) -> bytes:
        """Return events, as `Translation.read_events` describes.

        The events before one that is an error are returned first.
        """
        if self._error is not None:
            raise self._error
        found = bytearray()
        try:
            for data in data_of_each(events):
                found += self._events_of(data)
        except (UpstreamFailed, GatewayError) as error:
            if not found:
                raise
            self._error = error
        return bytes(found)

    def end_events(self) -> bytes:
        """Return the last events, as `Translation.end_events` describes."""
        if self._error is not None:
            raise self._error
        self._writer.begin(self._usage)
        return self._writer.end(self._usage, self._metrics)

    def failure(self, error: GatewayError, request_id: str) -> bytes:
        """Return the events that end the stream with an error."""
        render = self._writer.fail if self._has_begun else self._failure
        return render(error, request_id)

    def _encode(self, model: str, *, continuous_usage: bool) -> bytes:
        return chat_body(self._read_chat(), model, continuous_usage=continuous_usage)

    def _events_of(self, data: bytes) -> bytes:
        """Return the client's events for the data of an event, which a comment does not have."""
        if not data:
            return self.heartbeat
        if data.strip() == b"[DONE]":
            return b""
        chunk, writer = self._chunks.read(data), self._writer
        if chunk.error is not None:
            raise chunk.error
        self._has_begun = True
        self._note(chunk)
        writer.begin(chunk.usage)
        writer.add(chunk.output)
        return writer.take_events()

    def _note(self, chunk: Chunk) -> None:
        """Note what a chunk says about the response as a whole."""
        writer = self._writer
        writer.model = writer.model or chunk.model
        if chunk.finish is not None:
            writer.note_end(chunk.finish, chunk.stop_text, is_filtered=chunk.is_filtered)
        if chunk.usage is not UNSET:
            self._usage = chunk.usage
        if chunk.metrics is not UNSET:
            self._metrics = chunk.metrics


class MessageTranslation(ChatTranslation):
    """A request to `/v1/messages`."""

    heartbeat = MessageRendering.heartbeat
    _params = anthropic.PARAMS

    def _read(self) -> tuple[ChatBody, Mapping[str, str]]:
        self._writer = MessageWriter(self._request_id, "")
        return read_messages(self._body)


class ResponseTranslation(ChatTranslation):
    """A request to `/v1/responses`."""

    _params = responses.PARAMS

    def _read(self) -> tuple[ChatBody, Mapping[str, str]]:
        wire, chat, names = read_responses(self._body)
        _check_previous(wire)
        if wire.truncation == "auto":
            raise Unsupported("truncation", " 'auto'", advice=_ONLY_CHATS)
        if wire.top_logprobs:
            raise Unsupported("top_logprobs", advice=_ONLY_CHATS)
        if chat.logprobs:
            raise Unsupported("include", f" {LOGPROBS!r}", advice=_ONLY_CHATS)
        sampling = SamplingParams(
            max_tokens=0,
            seed=0,
            temperature=_given(wire.temperature, 1.0),
            top_p=_given(wire.top_p, 1.0),
            presence_penalty=_given(wire.presence_penalty, 0.0),
            frequency_penalty=_given(wire.frequency_penalty, 0.0),
        )
        self._writer = ResponseWriter(self._request_id, "", wire, sampling, int(time.time()))
        return chat, names


def _check_previous(wire: ResponsesBody) -> None:
    if wire.previous_response_id is not None:
        advice = f"{_ONLY_CHATS} and stores no responses; send the whole conversation as input"
        raise Unsupported("previous_response_id", advice=advice)


def _given(value: float | None, default: float) -> float:
    return default if value is None else value
