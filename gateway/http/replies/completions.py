"""Responses of `/v1/chat/completions` and `/v1/completions`."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import UNSET, UnsetType

from draftgate.backends.types import Delta, FinishReason, TokenLogprob
from draftgate.gateway.http.replies.logprobs import key_namer, token_logprobs, top_by_name
from draftgate.gateway.http.replies.metric_shapes import ResponseMetrics
from draftgate.gateway.http.replies.prompts import PromptReplies, TextOffsets
from draftgate.gateway.http.replies.reasoning import ReasoningParser
from draftgate.gateway.http.replies.rendering import (
    Choices,
    ChunkRendering,
    WholeChoice,
    stop_reason,
)
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
    OptionalIds,
    PromptField,
    ToolCall,
    ToolCallDelta,
    Usage,
)
from draftgate.gateway.http.replies.steps import step_replies
from draftgate.gateway.http.requests.tools import OfferedTools
from draftgate.gateway.http.requests.validation import ParsedRequest
from draftgate.gateway.tools.parsing import call_id


class CompletionRendering(ChunkRendering):
    """The rendering for `/v1/completions`."""

    id_prefix = "cmpl-"
    _object = _chunk_object = "text_completion"

    def __init__(self, parsed: ParsedRequest, created_s: int) -> None:
        super().__init__(parsed, created_s)
        self._offsets: dict[int, TextOffsets] = {}  # by choice
        self._prompts = PromptReplies(parsed)

    def response(self, choices: Choices, usage: Usage, metrics: ResponseMetrics) -> bytes:
        """Return the JSON of the whole response, as `Rendering.response` describes."""
        kept, n = self._parsed.kept_choices, self._parsed.job.n
        if kept is not None:
            prompts = (choices[begin : begin + n] for begin in range(0, len(choices), n))
            choices = [choice for of_prompt in prompts for choice in best(of_prompt, kept)]
        return super().response(choices, usage, metrics)

    def _whole_choice(self, index: int, choice: WholeChoice) -> CompletionChoice:
        self._prompts.observe(index, choice.prompt_logprobs)
        return CompletionChoice(
            index,
            self._echo(index) + "".join(choice.texts),
            self._logprobs(index, choice.logprobs),
            choice.finish_reason,
            step_replies(choice, self._parsed.served.tokenizer),
            self._prompts.field(index // self._parsed.job.n),
            self._ids(choice),
            self._prompt_ids(index),
            stop_reason(self._parsed, choice),
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
            token_ids=self._ids(delta),
            prompt_token_ids=self._prompt_ids(delta.choice),
            stop_reason=stop_reason(self._parsed, delta),
        )

    def _echo(self, choice: int) -> str:
        """Return the text of the prompt, once for each choice, or nothing without `echo`."""
        if not self._parsed.echoed or choice in self._begun:
            return ""
        return self._parsed.echoed[self._prompt(choice)]

    def _prompt_ids(self, choice: int) -> OptionalIds:
        """Return the tokens of the prompt once for each choice, if the request asks for them."""
        if not self._parsed.return_token_ids or choice in self._begun:
            return UNSET
        return self._parsed.job.prompts[self._prompt(choice)].tolist()

    def _prompt(self, choice: int) -> int:
        """Return the index of the prompt of a choice in the response."""
        return choice // (self._parsed.kept_choices or self._parsed.job.n)

    def _logprobs(self, choice: int, entries: Sequence[TokenLogprob]) -> CompletionLogprobs | None:
        if not self._wants_logprobs:
            return None
        name = key_namer(self._parsed)
        reply = CompletionLogprobs([], [], [], [])
        offsets = self._offsets.get(choice)
        if offsets is None:
            prompt, begin = self._prompt(choice), 0
            if self._parsed.echoed:
                reply = self._prompts.echoed_logprobs(prompt)
                begin = len(self._parsed.echoed[prompt])
            offsets = self._offsets[choice] = TextOffsets(self._parsed, prompt, begin)
        for entry in entries:
            reply.tokens.append(name(entry.token_id))
            reply.token_logprobs.append(entry.logprob)
            reply.top_logprobs.append(top_by_name(entry.token_id, entry.logprob, entry.top, name))
            reply.text_offset.append(offsets.add(entry.token_id))
        return reply


def best(choices: Choices, count: int) -> Choices:
    """Return the choices whose tokens have the highest mean log probability, best first."""

    def mean_logprob(choice: WholeChoice) -> float:
        return sum(one.logprob for one in choice.logprobs) / max(len(choice.logprobs), 1)

    return sorted(choices, key=mean_logprob, reverse=True)[:count]


class ChatRendering(ChunkRendering):
    """The rendering for `/v1/chat/completions`."""

    id_prefix = "chatcmpl-"
    _object = "chat.completion"
    _chunk_object = "chat.completion.chunk"

    def __init__(self, parsed: ParsedRequest, created_s: int) -> None:
        super().__init__(parsed, created_s)
        self._calls: dict[int, _ChoiceCalls] = {}  # by choice, if the request has tools
        self._reasoning: dict[int, ReasoningParser] = {}  # by choice, if the model marks it
        self._sent_prompt = False

    def _whole_choice(self, index: int, choice: WholeChoice) -> ChatChoice:
        finish = choice.finish_reason
        reasoning, text = self._split_reasoning(index, "".join(choice.texts), finish)
        text, calls, reason = self._read(index, text, finish)
        message = ChatMessage(text or None if calls or reasoning else text)
        if reasoning:
            message.reasoning_content = reasoning
        if calls:
            message.tool_calls = [_whole_call(call) for call in calls]
        steps = step_replies(choice, self._parsed.served.tokenizer)
        logprobs = self._logprobs(choice.logprobs)
        ids, ended = self._ids(choice), stop_reason(self._parsed, choice)
        return ChatChoice(index, message, logprobs, reason, steps, ids, ended)

    def _prompt_field(self, choices: Choices) -> PromptField:
        prompts = PromptReplies(self._parsed)
        prompts.observe(0, choices[0].prompt_logprobs)
        return prompts.field(0)

    def _chunk_choice(self, delta: Delta) -> ChatChunkChoice | None:
        finish = delta.finish_reason
        reasoning, text = self._split_reasoning(delta.choice, delta.text, finish)
        text, calls, reason = self._read(delta.choice, text, finish)
        ids, parts = self._ids(delta), text or calls or reasoning
        if not (parts or delta.logprobs or delta.steps or reason or ids):
            return None  # the parsers hold back text that may begin a call or end the reasoning
        role: str | UnsetType = UNSET if delta.choice in self._begun else "assistant"
        content: str | UnsetType = text if text or (role and not parts) else UNSET
        return ChatChunkChoice(
            delta.choice,
            ChatDelta(role, content, calls or UNSET, reasoning or UNSET),
            self._logprobs(delta.logprobs),
            reason,
            step_replies(delta, self._parsed.served.tokenizer),
            ids,
            stop_reason(self._parsed, delta),
        )

    def _prompt_ids_of_reply(self) -> OptionalIds:
        if not self._parsed.return_token_ids or self._sent_prompt:
            return UNSET
        self._sent_prompt = True
        return self._parsed.job.prompts[0].tolist()

    def _split_reasoning(
        self, choice: int, text: str, reason: FinishReason | None
    ) -> tuple[str, str]:
        """Return the reasoning and the rest in the text that a delta adds to a choice."""
        if self._parsed.reasoning is None:
            return "", text
        if choice not in self._reasoning:
            self._reasoning[choice] = ReasoningParser(self._parsed.reasoning)
        parser = self._reasoning[choice]
        reasoning, rest = parser.add(text)
        if reason is None:
            return reasoning, rest
        last, held = parser.finish()
        return reasoning + last, rest + held

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
        return ChatLogprobs(token_logprobs(entries, self._parsed))


class _ChoiceCalls:
    """A parser of the function calls in the text of one choice.

    Args:
        seed: a text unique to the request and the choice, from which the ids of calls are derived.
    """

    def __init__(self, tools: OfferedTools, seed: str) -> None:
        self._parser = tools.parser()
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
            pieces += self._parser.finish(cut=reason is FinishReason.LENGTH)
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
