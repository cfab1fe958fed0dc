"""User messages of the six kinds of Spec-Bench, made from templates, so that none is downloaded."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Final

from bench.engine.recorded_tasks import CITIES, NAMES, PRODUCTS, passage, templated


def _chat(rng: random.Random) -> str:
    name, city, product = rng.choice(NAMES), rng.choice(CITIES), rng.choice(PRODUCTS)
    return rng.choice(
        (
            f"Write a letter in which {name} tells a friend about a week in {city}.",
            f"Describe a {product} to somebody who has never seen one.",
            f"Give {name} five tips for a first job interview in {city}.",
            f"Write a short story that begins when {name} finds a {product} in {city}.",
        )
    )


def _translation(rng: random.Random) -> str:
    name, city, year = rng.choice(NAMES), rng.choice(CITIES), rng.randint(1950, 2020)
    sentence = rng.choice(
        (
            f"{name} zog im Jahr {year} nach {city}, weil die Miete dort viel niedriger war.",
            f"Seit {year} findet der Markt in {city} jeden Samstag am Bahnhof statt.",
            f"In {city} hat {name} {rng.randint(2, 20)} Jahre lang in einer Schule gearbeitet.",
        )
    )
    return f"Translate German to English: {sentence}"


def _summary(rng: random.Random) -> str:
    text = " ".join(passage(rng, city) for city in rng.sample(CITIES, 2))
    return f"Summarize the following text in two sentences.\n\n{text}"


def _question(rng: random.Random) -> str:
    city, product = rng.choice(CITIES), rng.choice(PRODUCTS)
    return rng.choice(
        (
            f"In which country is {city}, and what is the city known for?",
            f"What is a {product} made of?",
            f"Who would need a {product}, and why?",
            f"How long does it take to travel from {city} to {rng.choice(CITIES)}?",
        )
    )


def _sum(rng: random.Random) -> str:
    name, product, sold = rng.choice(NAMES), rng.choice(PRODUCTS), rng.randint(3, 30)
    return (
        f"{name} sells {sold} pieces of a {product} on Monday, and {rng.randint(2, 4)} times as "
        f"many on Tuesday. Each costs {rng.randint(5, 60)} dollars. How much money does {name} "
        f"earn? Think step by step."
    )


def _retrieval(rng: random.Random) -> str:
    (conversation,) = templated("retrieval", 1, rng.randrange(1 << 30))
    return conversation.turns[0].message


_KINDS: Final[tuple[Callable[[random.Random], str], ...]] = (
    _chat,
    _translation,
    _summary,
    _question,
    _sum,
    _retrieval,
)


def chats(count: int, seed: int = 0) -> list[str]:
    """Return `count` different messages, in turns of the six kinds, identical for the same seed."""
    rng = random.Random(seed)
    found: dict[str, None] = {}
    while len(found) < count:
        found.setdefault(_KINDS[len(found) % len(_KINDS)](rng))
    return list(found)
