"""The text that a terminal shows once a node listens."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, TypeAlias

from draftgate import __version__
from draftgate.backends.checkpoints import is_shipped_model
from draftgate.backends.model_store.known_models import CHAT_MODEL
from draftgate.backends.types import ModelCard, Task
from draftgate.gateway.app import Listening
from draftgate.gateway.http.endpoints.health import outage_of
from draftgate.gateway.model_service import ModelService
from draftgate.gateway.node import Node
from draftgate.gateway.process import resident_bytes


def banner(where: Listening) -> str:
    """Return the address, the served model and an example request."""
    node = where.node
    lines = [
        ("API", f"{where.url}/v1"),
        ("live page", f"{where.url}/"),
        *(_upstreams(node) if node.models[0].forwards else _models(node)),
        *_chat(where),
        ("stop", "Ctrl-C waits for open streams; press it twice to stop immediately"),
    ]
    shown = "\n".join(f"  {label:12} {value}" for label, value in lines)
    outage = outage_of(node)
    state = "is ready" if outage is None else f"is not ready: {outage}"
    return f"\nDraftgate {__version__} {state}\n{shown}\n\n{_curl(where.url, node)}\n"


def _chat(where: Listening) -> Iterator[tuple[str, str]]:
    """Yield how to chat, or how to get a model that does."""
    if _chats(where.node):
        key = " --api-key KEY" if where.node.accounts.required else ""
        yield "chat", f"draftgate chat --url {where.url}{key}"
    elif _completes_code(where.node):
        yield "chat", f"this model completes code; to chat: draftgate serve {CHAT_MODEL}"


def _models(node: Node) -> list[tuple[str, str]]:
    known = [model for model in node.models if model.is_known]
    own = [model for model in known if not model.forwards]
    proposers = dict.fromkeys(name for model in own for name in model.fleet.proposers)
    adapters = ", ".join(name for model in own for name in model.fleet.adapters())
    return [
        *(line for model in known for line in _about(model, node, several=len(own) > 1)),
        *([("adapters", adapters)] if adapters else []),
        *_memory([worker.backend.card for model in own for worker in model.fleet.workers]),
        ("speculation", f"{node.policy.name}; proposers: {', '.join(proposers) or 'none'}"),
    ]


def _completes_code(node: Node) -> bool:
    """Return whether the first model is the shipped one, which does not follow instructions."""
    config = node.config
    return config.backend == "engine" and not config.no_worker and is_shipped_model(config.model)


def _chats(node: Node) -> bool:
    """Return whether the first model follows instructions, as far as its chat template shows."""
    first = node.models[0]
    return first.is_known and not first.forwards and first.served.chats(first.fleet.card)


def _about(model: ModelService, node: Node, *, several: bool) -> Iterator[tuple[str, str]]:
    """Yield the lines about a model, or about the upstreams.

    Args:
        several: whether the node has several models of its own, which the lines then distinguish.
    """
    if model.forwards:
        yield "upstreams", _addresses(model)
        return
    first = several and model is node.models[0]
    yield "model", _described(model, node) + (", the default" if first else "")
    defaults = model.served.defaults().given()
    if defaults:
        values = ", ".join(f"{name} {value:g}" for name, value in defaults.items())
        yield "defaults", values + (f" ({model.served.name})" if several else "")


def _described(model: ModelService, node: Node) -> str:
    served, workers = model.served, model.fleet.workers
    elsewhere = model.fleet.size == 0 and node.siblings is None
    where = f"pool {node.config.pool}" if elsewhere else node.config.backend
    several = f", {len(workers)} workers" if len(workers) > 1 else ""
    return f"{served.name} ({where}{several}, {served.max_model_len} tokens of context)"


def _memory(cards: Sequence[ModelCard]) -> Iterator[tuple[str, str]]:
    """Yield the line about the memory of the workers of this process, if there are any."""
    weights, kv = sum(c.weight_bytes for c in cards), sum(c.kv_bytes for c in cards)
    if not weights:
        return
    used = resident_bytes()
    total = "" if used is None else f", up to {(used + kv) / 1e9:.2f} GB in total"
    tokens = sum(card.pool_tokens for card in cards)
    cache = f", up to {kv / 1e9:.2f} GB of KV cache ({tokens:,} tokens)" if kv else ""
    yield "memory", f"{weights / 1e9:.2f} GB of weights{cache}{total}"


def _upstreams(node: Node) -> list[tuple[str, str]]:
    model = node.models[0]
    return [
        ("model", model.name or "unknown until an upstream responds"),
        ("upstreams", _addresses(model)),
    ]


def _addresses(model: ModelService) -> str:
    return ", ".join(
        worker.backend.card.root + ("" if worker.backend.failure is None else " (does not respond)")
        for worker in model.fleet.workers
    )


_Example: TypeAlias = tuple[str, Mapping[str, object]]

_QUESTION: Final = {"role": "user", "content": "What is the capital of France?"}
_CHAT: Final[_Example] = ("chat/completions", {"messages": [_QUESTION], "stream": True})
"""The endpoint and the body of a first request to a model that follows instructions."""

_EXAMPLES: Final[Mapping[Task, _Example]] = {
    Task.GENERATE: (
        "completions",
        {"prompt": "def fibonacci(n):", "max_tokens": 64, "stream": True},
    ),
    Task.EMBED: ("embeddings", {"input": "def fibonacci(n):"}),
    Task.SCORE: (
        "rerank",
        {"query": "a sequence", "documents": ["def fibonacci(n):", "import os"]},
    ),
}
"""The same for other models, by their task."""


def _curl(url: str, node: Node) -> str:
    """Return a first request as a command, for the first task of the model."""
    tasks = node.fleet.card.capabilities.tasks
    path, fields = _CHAT if _chats(node) else _EXAMPLES[tasks[0]]
    body = json.dumps({"model": node.models[0].name, **fields})
    key = " -H 'Authorization: Bearer KEY'" if node.accounts.required else ""
    return f"curl -N {url}/v1/{path}{key} -H 'Content-Type: application/json' -d '{body}'"
