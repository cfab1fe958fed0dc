"""The base classes that render responses in the format of an endpoint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, NamedTuple, Protocol

import msgspec
from msgspec import UNSET

from draftgate.backends.prompt_logprobs import PromptLogprobs
from draftgate.backends.types import Delta, FinishReason, StepTrace, TokenLogprob
from draftgate.gateway.errors import ErrorFormat, GatewayError
from draftgate.gateway.http.replies.metric_shapes import OptionalMetrics, ResponseMetrics
from draftgate.gateway.http.replies.output import Output
from draftgate.gateway.http.replies.shapes import (
    ChatChoice,
    ChatChunkChoice,
    CompletionChoice,
    OptionalIds,
    OptionalUsage,
    PromptField,
    Reply,
    StopReason,
    Usage,
)
from draftgate.gateway.http.requests.validation import ParsedRequest

encode: Final = msgspec.json.Encoder().encode

DONE: Final = b"data: [DONE]\n\n"
"""The last event of a stream of chunks."""

COMMENT: Final = b": waiting\n\n"
"""A comment, which clients ignore."""


@dataclass(slots=True)
class WholeChoice:
    """A choice collected for a response that is not streamed.

    Attributes:
        stop_text: the stop text that ended the choice, or empty.
        prompt_logprobs: log probabilities of the prompt, if the choice reports them.
    """

    texts: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_text: str = ""
    steps: list[StepTrace] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    prompt_logprobs: PromptLogprobs | None = None

    def append(self, delta: Delta) -> None:
        """Append the output of a step."""
        self.texts.append(delta.text)
        self.logprobs.extend(delta.logprobs)
        self.finish_reason = delta.finish_reason
        self.stop_text = delta.stop_text
        if delta.prompt_logprobs is not None:
            self.prompt_logprobs = delta.prompt_logprobs
        self.steps.extend(delta.steps)
        self.token_ids.extend(delta.token_ids)


Choices = Sequence[WholeChoice]


class TextFrame(NamedTuple):
    """The bytes before and after the JSON of the text in events that differ only in their text."""

    before: bytes
    after: bytes

    def event(self, text: str) -> bytes:
        """Return the event with a text."""
        return self.before + encode(text) + self.after


_ANY_TEXT: Final = "\0"


class Rendering:
    """The response to one request in the format of its endpoint.

    The rendering keeps track of the sent output. A stream has the result of `chunk` for each delta,
    followed by the result of `ending` or `failure`. Each result has complete server-sent events,
    possibly none.

    Attributes:
        heartbeat: what a stream sends while it is silent.
        id_prefix: the beginning of the ids of responses.
        stored: whether the response is stored, or is to be stored at its end.
    """

    heartbeat: ClassVar[bytes] = COMMENT
    id_prefix: ClassVar[str]

    def __init__(self, parsed: ParsedRequest, created_s: int) -> None:
        """Prepare a response.

        Args:
            created_s: Unix time in seconds.
        """
        self._parsed = parsed
        self._created_s = created_s
        self.stored = bool(parsed.conversation)

    @property
    def response_id(self) -> str:
        """The id of the response."""
        return f"{self.id_prefix}{self._parsed.job.request_id}"

    def finish(self, choices: Choices, usage: Usage, metrics: ResponseMetrics) -> bytes:
        """Finish a response that is to be stored, and return its JSON.

        The call precedes `response` or `ending`. Only endpoints that store responses support it.

        Args:
            choices: the whole output, or nothing if `chunk` has rendered the output.
        """
        raise NotImplementedError

    def response(self, choices: Choices, usage: Usage, metrics: ResponseMetrics) -> bytes:
        """Return the JSON of the whole response."""
        raise NotImplementedError

    def chunk(
        self, delta: Delta, usage: OptionalUsage = UNSET, metrics: OptionalMetrics = UNSET
    ) -> bytes:
        """Return the events of a delta.

        Args:
            delta: the output of a step for a choice.
            usage: tokens so far, if each chunk reports them.
            metrics: metrics for the last delta of a stream that ends without usage.
        """
        raise NotImplementedError

    def text_frame(self, choice: int) -> TextFrame | None:
        """Return the frame of all further chunks of a choice with nothing but tokens and text.

        The result is None if such chunks differ in more than their text.
        """
        return None

    def ending(self, usage: OptionalUsage = UNSET, metrics: OptionalMetrics = UNSET) -> bytes:
        """Return the events after the last delta."""
        raise NotImplementedError

    def failure(self, error: GatewayError, request_id: str) -> bytes:
        """Return the events that end a failed response.

        Args:
            request_id: the id of the request, as in its headers.
        """
        return error_event(error, request_id)


class ReplyWriter(Protocol):
    """Writes a response from output that has been split into reasoning, content and calls.

    Attributes:
        model: the name of the model.
    """

    model: str

    def begin(self, usage: OptionalUsage) -> None:
        """Add the first events, unless there are some.

        Args:
            usage: the tokens so far, if they are known.
        """

    def add(self, output: Output) -> None:
        """Add output."""

    def note_end(
        self, reason: FinishReason | None, stop_text: str, *, is_filtered: bool = False
    ) -> None:
        """Note what has ended the output.

        Args:
            reason: the reason, or None before the end.
            stop_text: the stop text that ended the output, or empty.
            is_filtered: whether a filter for content has ended the output.
        """

    def take_events(self) -> bytes:
        """Return the events that were not returned yet."""

    def end(self, usage: OptionalUsage, metrics: OptionalMetrics) -> bytes:
        """Finish the response, and return the last events of its stream."""

    def whole(self, usage: OptionalUsage, metrics: OptionalMetrics) -> bytes:
        """Finish the response, and return its JSON."""

    def fail(self, error: GatewayError, request_id: str) -> bytes:
        """Return the last events of a stream that ends with an error."""


def event(data: bytes, name: str = "") -> bytes:
    """Return a server-sent event, with or without a name."""
    head = b"event: " + name.encode() + b"\n" if name else b""
    return head + b"data: " + data + b"\n\n"


class ChunkRendering(Rendering):
    """The common part of chats and completions.

    A chunk looks like a response with one choice.
    """

    _object: ClassVar[str]
    _chunk_object: ClassVar[str]

    def __init__(self, parsed: ParsedRequest, created_s: int) -> None:
        super().__init__(parsed, created_s)
        hidden = parsed.hides_logprobs
        self._wants_logprobs = parsed.job.sampling.logprobs is not None and not hidden
        self._begun: set[int] = set()  # choices of which a chunk was sent
        self._has_frames = not (
            parsed.tools or parsed.reasoning or parsed.return_token_ids or parsed.continuous_usage
        )

    def response(self, choices: Choices, usage: Usage, metrics: ResponseMetrics) -> bytes:
        """Return the JSON of the whole response, as `Rendering.response` describes."""
        rendered = [self._whole_choice(index, choice) for index, choice in enumerate(choices)]
        prompt, prompt_ids = self._prompt_field(choices), self._prompt_ids_of_reply()
        return self._reply(self._object, rendered, usage, metrics, prompt_ids, prompt)

    def chunk(
        self, delta: Delta, usage: OptionalUsage = UNSET, metrics: OptionalMetrics = UNSET
    ) -> bytes:
        """Return the events of a delta, as `Rendering.chunk` describes."""
        choice = self._chunk_choice(delta)
        if choice is None:
            return b""
        self._begun.add(delta.choice)
        prompt_ids = self._prompt_ids_of_reply()
        return event(self._reply(self._chunk_object, [choice], usage, metrics, prompt_ids))

    def text_frame(self, choice: int) -> TextFrame | None:
        """Return the frame of chunks, as `Rendering.text_frame` describes."""
        if not self._has_frames or choice not in self._begun:
            return None
        # Nothing after the text contains characters that the client chose.
        rendered = self.chunk(Delta(choice, (), _ANY_TEXT))
        before, _, after = rendered.rpartition(encode(_ANY_TEXT))
        return TextFrame(before, after)

    def ending(self, usage: OptionalUsage = UNSET, metrics: OptionalMetrics = UNSET) -> bytes:
        """Return the events after the last delta, as `Rendering.ending` describes."""
        if usage is UNSET:
            return DONE
        return event(self._reply(self._chunk_object, [], usage, metrics)) + DONE

    def _whole_choice(self, index: int, choice: WholeChoice) -> ChatChoice | CompletionChoice:
        raise NotImplementedError

    def _prompt_field(self, choices: Choices) -> PromptField:
        """Return the field `prompt_logprobs` of the whole response."""
        return UNSET

    def _chunk_choice(self, delta: Delta) -> ChatChunkChoice | CompletionChoice | None:
        """Return the choice of a chunk, or None without output to send yet."""
        raise NotImplementedError

    def _prompt_ids_of_reply(self) -> OptionalIds:
        """Return the tokens of the prompt for the first reply, if the format has them there."""
        return UNSET

    def _ids(self, output: Delta | WholeChoice) -> OptionalIds:
        """Return the tokens of an output, if the request asks for them."""
        return output.token_ids if self._parsed.return_token_ids else UNSET

    def _reply(
        self,
        kind: str,
        choices: list[Any],
        usage: OptionalUsage = UNSET,
        metrics: OptionalMetrics = UNSET,
        prompt_ids: OptionalIds = UNSET,
        prompt: PromptField = UNSET,
    ) -> bytes:
        name, model = self.response_id, self._parsed.served.name
        begin = (name, kind, self._created_s, model, choices)
        return encode(Reply(*begin, usage, metrics, prompt, prompt_ids))


def error_event(
    error: GatewayError, request_id: str, wanted: ErrorFormat = ErrorFormat.OPENAI
) -> bytes:
    """Return the event of an error, which has a name only in Anthropic's format."""
    return event(error.body(wanted, request_id), "error" if wanted is ErrorFormat.ANTHROPIC else "")


def stop_reason(parsed: ParsedRequest, output: Delta | WholeChoice) -> StopReason:
    """Return what ended a choice, or None if neither a stop text nor a stop token did.

    The result is unset for a delta that does not end its choice.
    """
    if output.finish_reason is None:
        return UNSET
    if output.stop_text:
        return output.stop_text
    sampling = parsed.job.sampling
    if output.finish_reason is not FinishReason.STOP or not output.token_ids:
        return None
    last = output.token_ids[-1]
    ends = () if sampling.ignore_eos and parsed.job.grammar is None else parsed.served.eos_ids
    return last if last in sampling.stop_token_ids and last not in ends else None
