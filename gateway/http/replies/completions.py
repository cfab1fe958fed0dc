"""Responses of `/v1/chat/completions` and `/v1/completions`."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import UNSET, UnsetType

from draftgate.backends.types import Delta, FinishReason, TokenLogprob
from draftgate.gateway.http.replies.logprobs import token_logprobs, top_by_text
from draftgate.gateway.http.replies.prompts import PromptReplies
from draftgate.gateway.http.replies.rendering import Choices, ChunkRendering, WholeChoice
from draftgate.gateway.http.replies.shapes import (
    ChatChoice,
    ChatChunkChoice,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    CompletionChoice,
    CompletionLogprobs,
    FunctionCall,
    FunctionCallDelta,
    PromptField,
    ToolCall,
    ToolCallDelta,
)
from draftgate.gateway.http.replies.steps import step_replies
from draftgate.gateway.http.requests.tools import OfferedTools
from draftgate.gateway.http.requests.validation import ParsedRequest
from draftgate.gateway.http.tools.parsing import CallParser, call_id


class CompletionRendering(ChunkRendering):
    """The rendering for `/v1/completions`."""

    _prefix = "cmpl"
    _object = _chunk_object = "text_completion"

    def __init__(self, parsed: ParsedRequest, created_s: int) -> None:
        super().__init__(parsed, created_s)
        self._offsets: dict[int, int] = {}  # number of characters sent, by choice
        self._prompts = PromptReplies(parsed)
        self._begun: set[int] = set()  # choices whose prompt was sent

    def _whole_choice(self, index: int, choice: WholeChoice) -> CompletionChoice:
        self._prompts.observe(index, choice.prompt_logprobs)
        return CompletionChoice(
            index,
            self._echo(index) + "".join(choice.texts),
            self._logprobs(index, choice.logprobs),
            choice.finish_reason,
            step_replies(choice, self._parsed.served.tokenizer),
            self._prompts.field(index // self._parsed.job.n),
        )

    def _chunk_choice(self, delta: Delta) -> CompletionChoice:
        text = delta.text
        if self._parsed.echoed:
            self._prompts.observe(delta.choice, delta.prompt_logprobs)
            text = self._echo(delta.choice) + text
        return CompletionChoice(
            delta.choice,
            text,
            self._logprobs(delta.choice, delta.logprobs),
            delta.finish_reason,
            step_replies(delta, self._parsed.served.tokenizer),
        )

    def _echo(self, choice: int) -> str:
        """Return the text of the prompt, once for each choice, or nothing without `echo`."""
        if not self._parsed.echoed or choice in self._begun:
            return ""
        self._begun.add(choice)
        return self._parsed.echoed[choice // self._parsed.job.n]

    def _logprobs(self, choice: int, entries: Sequence[TokenLogprob]) -> CompletionLogprobs | None:
        if not self._wants_logprobs:
            return None
        text = self._parsed.served.tokenizer.token_text
        reply = CompletionLogprobs([], [], [], [])
        offset = self._offsets.get(choice, 0)
        if self._parsed.echoed and choice not in self._offsets:
            prompt = choice // self._parsed.job.n
            reply = self._prompts.echoed_logprobs(prompt)
            offset = len(self._parsed.echoed[prompt])
        for entry in entries:
            token = text(entry.token_id)
            reply.tokens.append(token)
            reply.token_logprobs.append(entry.logprob)
            reply.top_logprobs.append(top_by_text(token, entry.logprob, entry.top, text))
            reply.text_offset.append(offset)
            offset += len(token)
        self._offsets[choice] = offset
        return reply


class ChatRendering(ChunkRendering):
    """The rendering for `/v1/chat/completions`."""

    _prefix = "chatcmpl"
    _object = "chat.completion"
    _chunk_object = "chat.completion.chunk"

    def __init__(self, parsed: ParsedRequest, created_s: int) -> None:
        super().__init__(parsed, created_s)
        self._begun: set[int] = set()  # choices whose role was sent
        self._calls: dict[int, _ChoiceCalls] = {}  # by choice, if the request has tools

    def _whole_choice(self, index: int, choice: WholeChoice) -> ChatChoice:
        text, calls, reason = self._read(index, "".join(choice.texts), choice.finish_reason)
        message = ChatMessage(text)
        if calls:
            message = ChatMessage(text or None, tool_calls=[_whole_call(call) for call in calls])
        steps = step_replies(choice, self._parsed.served.tokenizer)
        return ChatChoice(index, message, self._logprobs(choice.logprobs), reason, steps)

    def _prompt_field(self, choices: Choices) -> PromptField:
        prompts = PromptReplies(self._parsed)
        prompts.observe(0, choices[0].prompt_logprobs)
        return prompts.field(0)

    def _chunk_choice(self, delta: Delta) -> ChatChunkChoice | None:
        text, calls, reason = self._read(delta.choice, delta.text, delta.finish_reason)
        if not (text or calls or delta.logprobs or delta.steps or reason):
            return None  # the parser holds back text that may begin a call
        role: str | UnsetType = UNSET
        if delta.choice not in self._begun:
            self._begun.add(delta.choice)
            role = "assistant"
        content: str | UnsetType = text if text or (role and not calls) else UNSET
        return ChatChunkChoice(
            delta.choice,
            ChatDelta(role, content, calls or UNSET),
            self._logprobs(delta.logprobs),
            reason,
            step_replies(delta, self._parsed.served.tokenizer),
        )

    def _read(
        self, choice: int, text: str, reason: FinishReason | None
    ) -> tuple[str, list[ToolCallDelta], str | None]:
        """Return the content and calls in the text of a choice, and its finish reason."""
        if self._parsed.tools is None:
            return text, [], reason
        if choice not in self._calls:
            seed = f"{self._parsed.job.request_id}/{choice}"
            self._calls[choice] = _ChoiceCalls(self._parsed.tools, seed)
        return self._calls[choice].read(text, reason)

    def _logprobs(self, entries: Sequence[TokenLogprob]) -> ChatLogprobs | None:
        if not self._wants_logprobs:
            return None
        return ChatLogprobs(token_logprobs(entries, self._parsed.served.tokenizer))


class _ChoiceCalls:
    """A parser of the function calls in the text of one choice.

    Args:
        seed: a text unique to the request and the choice, from which the ids of calls are derived.
    """

    def __init__(self, tools: OfferedTools, seed: str) -> None:
        self._parser = CallParser(tools.dialect, tools.names, several=tools.several)
        self._seed = seed
        self._count = 0

    def read(
        self, text: str, reason: FinishReason | None
    ) -> tuple[str, list[ToolCallDelta], str | None]:
        """Return the content and the calls that a text adds, with one entry for each call.

        Args:
            text: the next part of the response.
            reason: the finish reason with the last text of the choice, else None. A stop after
                calls is returned as `tool_calls`.
        """
        pieces = self._parser.add(text)
        if reason is not None:
            pieces += self._parser.finish()
        content, calls = "", list[ToolCallDelta]()
        for piece in pieces:
            content += piece.content
            if piece.name:
                begun = FunctionCallDelta("", piece.name)
                name = call_id(self._seed, self._count)
                calls.append(ToolCallDelta(self._count, begun, name, "function"))
                self._count += 1
            elif piece.arguments:
                if not calls:  # the arguments continue the last call of an earlier delta
                    calls.append(ToolCallDelta(self._count - 1, FunctionCallDelta("")))
                calls[-1].function.arguments += piece.arguments
        called = reason is FinishReason.STOP and self._count
        return content, calls, "tool_calls" if called else reason


def _whole_call(call: ToolCallDelta) -> ToolCall:
    function = FunctionCall(str(call.function.name), call.function.arguments)
    return ToolCall(str(call.id), function)
