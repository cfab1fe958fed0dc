"""Conversations with structured output, tool calls and agents, for a model with ChatML.

The texts are made of templates. Names, figures and questions are drawn with a seed, so no two
conversations are equal, while their instructions and their forms are. The replies are those of the
model. A tool's result does not depend on the call, so a bad call does not end a conversation.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import msgspec

from draftgate.backends.call_form import CallForm, FunctionForm
from draftgate.backends.types import GrammarKind, GrammarSpec

NAMES: Final = (
    "Ada Lindqvist", "Bruno Costa", "Chiara Romano", "Dmitri Volkov", "Elif Kaya", "Farid Haddad",
    "Grace Okafor", "Hiro Tanaka", "Irma Moreau", "Jonas Weber", "Kavya Nair", "Liam O'Brien",
    "Maria Silva", "Noor Rahman", "Oskar Nowak", "Priya Sharma",
)  # fmt: skip
CITIES: Final = (
    "Lisbon", "Oslo", "Krakow", "Lyon", "Osaka", "Nairobi", "Austin", "Toronto", "Pune", "Cork",
)  # fmt: skip
PRODUCTS: Final = (
    "wireless headphones", "a standing desk", "a water kettle", "running shoes", "a desk lamp",
    "a backpack", "a mechanical keyboard", "a phone case", "a rain jacket", "a coffee grinder",
)  # fmt: skip
FAULTS: Final = (
    "arrived with a broken part", "stopped working after two days", "has the wrong colour",
    "never arrived", "was charged twice", "does not fit", "makes a loud noise",
)  # fmt: skip
MODULES: Final = ("cart", "orders", "search", "login", "invoice", "stock", "reviews", "mailer")


class Turn(NamedTuple):
    """A message, and the grammar of the model's reply, which is None for free text.

    Attributes:
        text: what follows the previous reply, as ChatML, up to the reply.
    """

    text: str
    grammar: GrammarSpec | None = None


Conversation = tuple[Turn, ...]


def user_turn(content: str, grammar: GrammarSpec | None = None, system: str = "") -> Turn:
    """Return a message of a user, with a system prompt if it is the first one."""
    head = f"<|im_start|>system\n{system}<|im_end|>\n" if system else "<|im_end|>\n"
    message = f"<|im_start|>user\n{content}<|im_end|>\n<|im_start|>assistant\n"
    return Turn(head + message, grammar)


def _schema(properties: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


TICKET: Final = _schema({
    "customer_name": {"type": "string", "maxLength": 40},
    "city": {"type": "string", "maxLength": 30},
    "product": {"type": "string", "maxLength": 40},
    "order_number": {"type": "integer", "minimum": 0, "maximum": 99999},
    "category": {"enum": ["delivery", "defect", "billing", "other"]},
    "priority": {"enum": ["low", "medium", "high"]},
    "summary": {"type": "string", "maxLength": 120},
    "refund_requested": {"type": "boolean"},
})  # fmt: skip


def structured(rng: random.Random) -> Conversation:
    """Return a request to extract a support ticket as JSON."""
    text = (
        f"Dear team, my name is {rng.choice(NAMES)} and I live in {rng.choice(CITIES)}. I ordered "
        f"{rng.choice(PRODUCTS)} (order number {rng.randrange(10000, 99999)}), and it "
        f"{rng.choice(FAULTS)}. {rng.choice(('Please send a new one.', 'I want my money back.'))}"
    )
    system = "You extract support tickets. Reply with a JSON object that describes the message."
    grammar = GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps(TICKET))
    return (user_turn(text, grammar, system=system),)


STRING: Final = {"type": "string", "maxLength": 60}
TOOLS: Final[dict[str, dict[str, Any]]] = {
    "get_weather_forecast": _schema({
        "city": STRING, "days": {"type": "integer", "minimum": 1, "maximum": 14},
        "unit": {"enum": ["celsius", "fahrenheit"]},
    }),
    "create_calendar_event": _schema({
        "title": STRING, "date": {"type": "string", "pattern": "2026-[01][0-9]-[0-3][0-9]"},
        "attendee": STRING, "duration_minutes": {"type": "integer", "minimum": 5, "maximum": 480},
    }),
    "search_customer_orders": _schema({
        "customer_name": STRING, "product": STRING, "status": {"enum": ["open", "sent", "any"]},
    }),
    "send_email_message": _schema({"recipient": STRING, "subject": STRING, "body": STRING}),
}  # fmt: skip


def _calls(tools: dict[str, dict[str, Any]]) -> GrammarSpec:
    """Return the grammar of a call in Hermes' form, as the gateway writes it."""
    functions = tuple(
        FunctionForm(f'{{"name": "{name}", "arguments": ', schema, "}")
        for name, schema in tools.items()
    )
    form = CallForm(functions, opened="<tool_call>\n", closed="\n</tool_call>")
    return GrammarSpec(GrammarKind.CALLS, msgspec.json.encode(form).decode(), "tools")


def _tool_system(tools: dict[str, dict[str, Any]]) -> str:
    listed = "\n".join(
        json.dumps({"name": name, "parameters": schema["properties"]})
        for name, schema in tools.items()
    )
    return (
        f"You may call these functions:\n<tools>\n{listed}\n</tools>\nReply with a function call "
        'as JSON: <tool_call>\n{"name": NAME, "arguments": ARGUMENTS}\n</tool_call>'
    )


def tool_call(rng: random.Random) -> Conversation:
    """Return a request that a single function call answers."""
    name, city = rng.choice(NAMES), rng.choice(CITIES)
    asked = rng.choice((
        f"What will the weather be like in {city} in the next {rng.randrange(2, 9)} days?",
        f"Plan a meeting with {name} about {rng.choice(PRODUCTS)} on {rng.randrange(1, 28)} May.",
        f"Has the order of {rng.choice(PRODUCTS)} by {name} been sent?",
        f"Tell {name} that {rng.choice(PRODUCTS)} {rng.choice(FAULTS)}.",
    ))  # fmt: skip
    return (user_turn(asked, _calls(TOOLS), system=_tool_system(TOOLS)),)


FILES: Final[dict[str, dict[str, Any]]] = {
    "run_tests": _schema({"reason": STRING, "path": STRING}),
    "read_file": _schema({"reason": STRING, "path": STRING}),
    "search_code": _schema({"reason": STRING, "pattern": STRING, "path": STRING}),
    "replace_text": _schema({"reason": STRING, "path": STRING, "old": STRING, "new": STRING}),
}  # fmt: skip
AGENT_TURNS: Final = 5


def agent(rng: random.Random) -> Conversation:
    """Return a task of several turns that repairs a module: calls with reasons, and a report."""
    module, line = rng.choice(MODULES), rng.randrange(10, 90)
    field, limit = rng.choice(("price", "count", "total", "name")), rng.randrange(2, 50)
    source = (
        f"def check_{field}(item):\n    if item.{field} > {limit}:\n"
        f'        raise ValueError("{field} is too large")\n    return item.{field}\n'
    )
    results = (
        f"FAILED tests/test_{module}.py:{line}: ValueError: {field} is too large\n1 failed",
        f"src/{module}.py:{line}: def check_{field}(item):",
        f"# src/{module}.py\n{source}",
        f"src/{module}.py: 1 replacement",
        "13 passed",
    )
    grammar = _calls(FILES)
    first = f"The test of {field} in the module {module} fails at the limit. Please repair it."
    turns = [user_turn(first, grammar, system=_tool_system(FILES))]
    for number, result in enumerate(results[:AGENT_TURNS]):
        reply = None if number == AGENT_TURNS - 1 else grammar
        turns.append(user_turn(f"<tool_response>\n{result}\n</tool_response>", reply))
    return tuple(turns)


WORKLOADS: Final[dict[str, Callable[[random.Random], Conversation]]] = {
    "structured": structured,
    "tool_calls": tool_call,
    "agents": agent,
}
