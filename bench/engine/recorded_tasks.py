"""The conversations that `bench.engine.acceptance` records with a real model, by task.

Six tasks are those of Spec-Bench, read from its file. The templates of this module make the other
tasks: structured output, tool calls, code edits, answers from retrieved passages, and agents. A
conversation depends only on its task and number.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from draftgate.backends.call_form import CallForm, FunctionForm
from draftgate.backends.types import GrammarKind, GrammarSpec


class Turn(NamedTuple):
    """A message of the user, and what is known about its answer.

    Attributes:
        max_tokens: maximum length of the answer.
        grammar: constraint on the answer, or None.
        prediction: the answer that the client predicts, or empty.
        begun: text with which the answer begins, as a part of the prompt.
        stop: texts that end the answer.
        tokens: the whole prompt, in place of a message, or empty. Its answer has exactly
            `max_tokens` tokens.
    """

    message: str
    max_tokens: int
    grammar: GrammarSpec | None = None
    prediction: str = ""
    begun: str = ""
    stop: tuple[str, ...] = ()
    tokens: tuple[int, ...] = ()


class Conversation(NamedTuple):
    """A conversation, whose texts all belong to one half of the recording."""

    task: str
    number: int
    turns: tuple[Turn, ...]

    @property
    def held_out(self) -> bool:
        """Whether no constant may be chosen with it, which holds for every second one."""
        return self.number % 2 == 1


SPEC_BENCH: Final = {
    "translation": "translation",
    "summarization": "summary",
    "qa": "qa",
    "math_reasoning": "math",
    "rag": "rag",
}
"""Our tasks by category of Spec-Bench. All other categories are those of MT-Bench: `chat`."""

ANSWER_TOKENS: Final = {"chat": 224, "qa": 192, "math": 224, "translation": 160}
LONG_CONTEXT_TOKENS: Final = 96
"""Maximum lengths of answers, of which those to long contexts are shorter because they cost more.
"""


def spec_bench(file: Path) -> Iterator[Conversation]:
    """Yield the conversations of Spec-Bench, shuffled because categories stand in a row."""
    count: dict[str, int] = {}
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    random.Random("spec-bench").shuffle(rows)
    for row in rows:
        task = SPEC_BENCH.get(row["category"], "chat")
        index = count[task] = count.get(task, -1) + 1
        most = ANSWER_TOKENS.get(task, LONG_CONTEXT_TOKENS)
        yield Conversation(task, index, tuple(Turn(text, most) for text in row["turns"]))


NAMES: Final = (
    "Amara Okafor", "Benedikt Huber", "Chiara Ricci", "Dmitri Volkov", "Elif Kaya", "Farid Rahimi",
    "Grace Osei", "Hana Suzuki", "Ingrid Dahl", "Jorge Medina", "Kavya Nair", "Liam Byrne",
    "Mei Tanaka", "Nadia Haddad", "Oscar Lindqvist", "Priya Menon", "Quentin Roux", "Rosa Alvarez",
    "Samir Patel", "Tereza Novak",
)  # fmt: skip
CITIES: Final = (
    "Lisbon", "Osaka", "Nairobi", "Tallinn", "Montreal", "Valencia", "Cardiff", "Kraków", "Hobart",
    "Bergen", "Tbilisi", "Recife", "Ghent", "Izmir", "Adelaide", "Quito",
)  # fmt: skip
PRODUCTS: Final = (
    "steel kettle", "oak bookshelf", "desk lamp", "trail backpack", "wool blanket",
    "mechanical keyboard", "ceramic teapot", "rain jacket", "bicycle pump",
    "noise-cancelling headphones", "cast-iron pan", "garden hose", "standing desk",
    "travel adapter", "yoga mat", "espresso grinder",
)  # fmt: skip
COMPLAINTS: Final = (
    "arrived with a dent", "stopped working after two days",
    "is a different colour than the picture", "came without the manual", "makes a rattling noise",
    "was delivered to the wrong address", "is smaller than described", "has a loose handle",
)  # fmt: skip


def _contact(rng: random.Random) -> tuple[str, dict[str, Any]]:
    people = rng.sample(NAMES, 3)
    text = " ".join(
        f"{name} lives in {rng.choice(CITIES)} and can be reached at "
        f"{name.lower().replace(' ', '.')}@example.org or {rng.randint(200, 999)}-"
        f"{rng.randint(1000, 9999)}."
        for name in people
    )
    person = _object(name="string", city="string", email="string", phone="string")
    person["properties"]["phone"] = {"type": "string", "pattern": "^[0-9]{3}-[0-9]{4}$"}
    return f"Extract all contacts from this text:\n{text}", _list_of("contacts", person, 3)


def _order(rng: random.Random) -> tuple[str, dict[str, Any]]:
    lines = [
        f"{rng.randint(1, 9)} x {name} at {rng.randint(5, 250)}.{rng.choice(('00', '50', '95'))}"
        for name in rng.sample(PRODUCTS, 4)
    ]
    text = f"Order {rng.randint(10_000, 99_999)} by {rng.choice(NAMES)}: " + "; ".join(lines)
    item = _object(product="string", quantity="integer", price="number")
    schema = _list_of("items", item, 5)
    schema["properties"] = {"order": {"type": "integer"}, **schema["properties"]}
    schema["required"] = ["order", "items"]
    return f"Turn this order into JSON:\n{text}", schema


def _review(rng: random.Random) -> tuple[str, dict[str, Any]]:
    product, complaint = rng.choice(PRODUCTS), rng.choice(COMPLAINTS)
    text = (
        f"I bought the {product} for my flat in {rng.choice(CITIES)}. It {complaint}. The shop "
        f"answered after {rng.randint(2, 9)} days, and {rng.choice(NAMES)} from support was "
        f"{rng.choice(('very kind', 'of little help', 'hard to reach'))}."
    )
    schema = _object(product="string", summary="string", problem="string", reply="string")
    rating = {"sentiment": {"enum": ["positive", "mixed", "negative"]}}
    schema["properties"] = {**rating, **schema["properties"]}
    schema["required"] = list(schema["properties"])
    for name in ("product", "summary", "problem", "reply"):
        schema["properties"][name]["maxLength"] = 160
    return f"Classify this review and draft a reply:\n{text}", schema


def _plan(rng: random.Random) -> tuple[str, dict[str, Any]]:
    city, days = rng.choice(CITIES), rng.randint(3, 4)
    day = _object(day="integer", morning="string", evening="string")
    for name in ("morning", "evening"):
        day["properties"][name]["maxLength"] = 80
    return f"Plan {days} days in {city} for {rng.choice(NAMES)}.", _list_of("days", day, days)


def _object(**types: str) -> dict[str, Any]:
    properties: dict[str, Any] = {
        name: {"type": kind, **({"maxLength": 40} if kind == "string" else {})}
        for name, kind in types.items()
    }
    return {
        "type": "object",
        "properties": properties,
        "required": list(types),
        "additionalProperties": False,
    }


def _list_of(name: str, item: dict[str, Any], most: int) -> dict[str, Any]:
    schema = _object(**{name: "array"})
    schema["properties"][name] = {"type": "array", "items": item, "minItems": 2, "maxItems": most}
    return schema


def _structured(rng: random.Random) -> tuple[Turn, ...]:
    message, schema = rng.choice((_contact, _order, _review, _plan))(rng)
    text = json.dumps(schema)
    message = f"{message}\nAnswer with JSON of this schema:\n{text}"
    return (Turn(message, 224, GrammarSpec(GrammarKind.JSON_SCHEMA, text)),)


TOOLS: Final[dict[str, dict[str, Any]]] = {
    "search_flights": _object(origin="string", destination="string", day="string"),
    "get_weather": _object(city="string", unit="string"),
    "create_ticket": _object(customer="string", product="string", problem="string"),
    "send_email": _object(to="string", subject="string", body="string"),
    "query_orders": _object(customer="string", status="string", limit="integer"),
}
"""Tools of the assistants, with the schemas of their arguments."""

CALL: Final = ('<tool_call>{"name": "', '", "arguments": ', "}</tool_call>")
"""Texts around the name and the arguments of a call, as SmolLM2 and Qwen write them."""


def _calls(names: Iterable[str], between: str | None = None) -> GrammarSpec:
    functions = tuple(
        FunctionForm(f"{CALL[0]}{name}{CALL[1]}", TOOLS[name], CALL[2]) for name in names
    )
    form = CallForm(functions, between=between, markers=("<tool_call>", "</tool_call>"))
    return GrammarSpec(GrammarKind.CALLS, msgspec.json.encode(form).decode(), "tools")


_TOOL_LIST: Final = "You can call these tools:\n" + "\n".join(
    f"{name}({', '.join(schema['required'])})" for name, schema in TOOLS.items()
)


def _request(rng: random.Random) -> str:
    name, city, other = rng.choice(NAMES), *rng.sample(CITIES, 2)
    product = rng.choice(PRODUCTS)
    return rng.choice(
        (
            f"Find a flight from {city} to {other} on {rng.randint(1, 28)} May for {name}.",
            f"What is the weather in {city} and in {other} today?",
            (
                f"{name} from {city} says that the {product} {rng.choice(COMPLAINTS)}. "
                "Please open a ticket."
            ),
            (
                f"Write to {name.lower().replace(' ', '.')}@example.org that the {product} ships "
                f"from {city} on Monday."
            ),
            f"Show the last {rng.randint(2, 9)} open orders of {name}.",
        )
    )


def _tool_calls(rng: random.Random) -> tuple[Turn, ...]:
    between = rng.choice((None, None, "\n"))
    return (Turn(f"{_TOOL_LIST}\n\n{_request(rng)}", 160, _calls(TOOLS, between)),)


AGENT_CALLS: Final = 3
"""Number of calls of an agent, each of another tool, because small models repeat their calls."""


def _agent(rng: random.Random) -> tuple[Turn, ...]:
    """Return calls whose results the next turns report, and a report to the customer."""
    name, product = rng.choice(NAMES), rng.choice(PRODUCTS)
    goal = f"{name} writes that the {product} {rng.choice(COMPLAINTS)}. {_request(rng)}"
    first, *others = rng.sample(list(TOOLS), AGENT_CALLS)
    message = f"{_TOOL_LIST}\n\n{goal} Call one tool at a time, first {first}."
    turns = [Turn(message, 112, _calls([first]))]
    for tool in (*others, None):
        orders = [
            {"order": rng.randint(10_000, 99_999), "customer": name, "product": item}
            for item in (product, *rng.sample(PRODUCTS, rng.randint(1, 3)))
        ]
        result = json.dumps({"status": "ok", "orders": orders, "city": rng.choice(CITIES)})
        message = f"<tool_response>{result}</tool_response>\n"
        if tool is not None:
            turns.append(Turn(f"{message}Now call {tool}.", 112, _calls([tool])))
        else:
            turns.append(Turn(f"{message}Summarise for {name} what was done.", 160))
    return tuple(turns)


NOUNS: Final = (
    "order", "invoice", "ticket", "sensor", "route", "review", "session", "student", "device",
    "package",
)  # fmt: skip
FIELDS: Final = ("price", "weight", "score", "delay", "length", "count", "level", "amount")


def _code(rng: random.Random) -> list[str]:
    """Return three functions, each with an empty line at its end."""
    noun, first, second = rng.choice(NOUNS), *rng.sample(FIELDS, 2)
    limit = rng.randint(2, 90)
    functions = [
        (
            f"def total_{first}({noun}s):\n    total = 0\n    for {noun} in {noun}s:\n"
            f'        total += {noun}["{first}"]\n    return total\n'
        ),
        (
            f"def mean_{second}({noun}s):\n"
            f'    values = [{noun}["{second}"] for {noun} in {noun}s]\n'
            "    if not values:\n        return 0.0\n    return sum(values) / len(values)\n"
        ),
        (
            f"def large_{noun}s({noun}s, limit={limit}):\n"
            f"    found = []\n    for {noun} in {noun}s:\n"
            f'        if {noun}["{first}"] > limit and {noun}["{second}"] is not None:\n'
            f"            found.append({noun})\n    return found\n"
        ),
        (
            f"def by_{second}({noun}s):\n    groups = {{}}\n    for {noun} in {noun}s:\n"
            f'        groups.setdefault({noun}["{second}"], []).append({noun})\n    return groups\n'
        ),
    ]
    return [f"{function}\n\n" for function in rng.sample(functions, 3)]


def _code_edit(rng: random.Random) -> tuple[Turn, ...]:
    first, *others = _code(rng)
    edit = rng.choice(
        (
            "Rename the parameter of every function to `rows`.",
            "Add a one-line docstring to every function.",
            "Add type annotations to every function.",
            "Replace the loops by comprehensions where possible.",
            "Return None instead of an empty result.",
        )
    )
    rest = "".join(others)
    message = f"{edit} Repeat the whole file.\n\n```python\n{first}{rest}```"
    # The answer has begun, because a small model would write another file.
    return (Turn(message, 256, prediction=rest, begun=f"```python\n{first}", stop=("```",)),)


def passage(rng: random.Random, city: str) -> str:
    """Return six sentences about a workshop in a city."""
    founder, year, product = rng.choice(NAMES), rng.randint(1880, 2015), rng.choice(PRODUCTS)
    return (
        f"The {city} workshop was founded by {founder} in {year}. It makes the {product}, of which "
        f"it sold {rng.randint(2, 90)},000 pieces last year. Its {rng.randint(12, 400)} employees "
        f"work in {rng.randint(2, 6)} buildings near the {rng.choice(('river', 'port', 'station'))}"
        f". Since {year + rng.randint(5, 60)}, {rng.choice(NAMES)} has been its director. "
        f"Customers praise the {product}, although one in {rng.randint(20, 90)} "
        f"{rng.choice(COMPLAINTS)}."
    )


def _retrieval(rng: random.Random) -> tuple[Turn, ...]:
    cities = rng.sample(CITIES, 4)
    passages = "\n\n".join(
        f"[{number}] {passage(rng, city)}" for number, city in enumerate(cities, 1)
    )
    city, other = rng.sample(cities, 2)
    question = rng.choice(
        (
            f"Who founded the {city} workshop, and what does it make?",
            f"Compare the workshops in {city} and {other}.",
            f"Quote the sentences about the employees of the {city} workshop.",
            f"What do customers of the {city} workshop think, and who is its director?",
        )
    )
    return (Turn(f"Answer from these passages, and cite them.\n\n{passages}\n\n{question}", 192),)


TEMPLATES: Final[dict[str, Callable[[random.Random], tuple[Turn, ...]]]] = {
    "structured": _structured,
    "tool_calls": _tool_calls,
    "code_edit": _code_edit,
    "retrieval": _retrieval,
    "agent": _agent,
}


def templated(task: str, count: int, first: int = 0) -> Iterator[Conversation]:
    """Yield conversations of a task of this module, from the number `first` on."""
    for index in range(first, first + count):
        # The generator of random numbers is seeded by text, which is stable between versions.
        yield Conversation(task, index, TEMPLATES[task](random.Random(f"{task}/{index}")))


def conversations(file: Path, per_task: int) -> list[Conversation]:
    """Return up to `per_task` conversations of each task, in turns of the tasks."""
    found = [one for one in spec_bench(file) if one.number < per_task]
    found += [one for task in TEMPLATES for one in templated(task, per_task)]
    return sorted(found, key=lambda one: one.number)
