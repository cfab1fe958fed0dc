"""A worker whose model follows instructions, which the shipped model is too small for.

The model writes calls in the syntax of its chat template and answers in the requested form. Clients
whose tests need a capable model run against a node with this worker. The node does everything else:
the prompt, grammars, the recognition of calls, and responses.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Final

import msgspec

from draftgate.backends.call_form import CallForm
from draftgate.backends.grammar import LlGrammars
from draftgate.backends.tokenizer import Tokenizer
from draftgate.backends.types import GenerationRequest, GrammarKind, ModelCard
from draftgate.gateway.app import Listening
from tests.gateway.harness import ScriptedBackend, running
from tests.gateway.tool_models import with_template

CALL: Final = re.compile(r"call (?P<name>\w+) (?P<arguments>\{.*\})", re.IGNORECASE | re.DOTALL)
"""An instruction such as `Call get_weather {"city": "Rome"}`."""

ANSWER: Final = re.compile(r"answer (?P<text>.+)", re.IGNORECASE | re.DOTALL)
"""An instruction such as `Answer {"name": "Ada"}`."""

PROMPTS: Final = {
    r"Observation:\s*(.+?)\s*$": r'call final_answer {"answer": "\1"}',
    r"(?s)## question ## \]\]\n(.+?)\n\nRespond with the corresponding output fields": (
        r"answer [[ ## reply ## ]]\n\1\n\n[[ ## completed ## ]]"
    ),
    r"magic_function\(3\)": 'call magic_function {"input": 3}',
    r"magic_function_no_args": "call magic_function_no_args {}",
    r"Pirate greeting": 'call greeting_generator {"answer_style": "Pirate"}',
    r"weather in San Francisco": 'call get_weather {"location": "San Francisco, CA"}',
    r"customer named '(.+?)'": r'call unicode_customer {"customer_name": "\1", "description": "x"}',
    r"joke about cats": 'answer {"setup": "Why do cats purr?", "punchline": "They can."}',
}
"""The instructions that prompts of smolagents, DSPy and LangChain's tests mean, by a pattern."""

EXAMPLES: Final = {"integer": 3, "string": "x"}
"""Values in the requested form without an instruction, by JSON type."""

PIECE: Final = 5
"""Characters of a step. Steps end within markers of calls, as tokens of real models do."""


class Assistant(ScriptedBackend):
    """A worker whose model does what the last message says."""

    def __init__(self, model: Path) -> None:
        super().__init__()
        self.card = ModelCard("scripted", "scripted", 8192, "test", 1)
        self.kv_tokens = 8192
        self.tokenizer = Tokenizer(model)
        self.refused: list[str] = []
        """Answers that the grammar of their request does not allow."""
        self._grammars = LlGrammars(self.tokenizer, {0})

    async def answer_requests(self) -> None:
        """Answer requests until the task is cancelled."""
        while True:
            request = await self.submitted.get()
            answer = self.answer(request)
            pieces = [answer[i : i + PIECE] for i in range(0, len(answer), PIECE)]
            for choice in range(request.n):
                for number, piece in enumerate(pieces, 1):
                    self.emit(request, piece, choice=choice, last=number == len(pieces))
                    await asyncio.sleep(0)

    def answer(self, request: GenerationRequest) -> str:
        """Return the answer to a prompt, in the form that its grammar requires."""
        prompt = self.tokenizer.decode(request.prompt_ids, skip_special_tokens=False)
        said = prompt.rpartition("<|im_start|>user\n")[2].partition("<|im_end|>")[0]
        answer = self._follow(said, request)
        if request.grammar is not None:
            ids = self.tokenizer.encode(answer)
            if self._grammars.start(request.grammar).legal(ids) < len(ids):
                self.refused.append(answer)
        return answer

    def _follow(self, said: str, request: GenerationRequest) -> str:
        """Return what an instruction asks for, as text of the model."""
        said = next(
            (found.expand(to) for what, to in PROMPTS.items() if (found := re.search(what, said))),
            said,
        )
        called, answered, grammar = CALL.search(said), ANSWER.search(said), request.grammar
        if grammar is not None and grammar.kind is GrammarKind.CALLS:
            form = msgspec.json.decode(grammar.text, type=CallForm)
            if form.content is None:
                return _forced_call(form, called)
        if "<tool_response>" in said:
            return "The tool says: " + said.partition(">")[2].partition("</tool")[0].strip()
        if called:
            name, arguments = called["name"], called["arguments"]
            return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'
        if answered:
            return answered["text"].strip()
        if grammar is not None and grammar.kind is GrammarKind.JSON_SCHEMA:
            return _example(json.loads(grammar.text))
        return "Hello, how are you today?"


def _forced_call(form: CallForm, called: re.Match[str] | None) -> str:
    """Return the requested call, or a call of the first function with any arguments."""
    function = form.functions[0]
    arguments = _example(function.schema)
    if called is not None:
        name, arguments = f'"{called["name"]}"', called["arguments"]
        function = next(one for one in form.functions if name in one.head)
    return form.opened + function.head + arguments + function.tail + form.closed


def _example(schema: dict[str, Any]) -> str:
    """Return an object whose properties are examples of their types."""
    properties = schema.get("properties", {})
    return json.dumps({name: EXAMPLES.get(one.get("type")) for name, one in properties.items()})


@asynccontextmanager
async def assisting(directory: Path, template: str) -> AsyncIterator[tuple[Listening, Assistant]]:
    """Run a node with an assistant.

    Args:
        directory: folder of the model, which the function creates.
        template: name of the model's chat template.
    """
    assistant = Assistant(with_template(directory, template))
    answering = asyncio.create_task(assistant.answer_requests())
    async with running(backends=[assistant]) as gateway:
        yield gateway, assistant
    answering.cancel()
    with suppress(asyncio.CancelledError):
        await answering
