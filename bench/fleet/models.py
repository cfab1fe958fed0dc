"""Servers with a model each: names, aliases, and fallbacks from one model to another.

There are two vLLM servers. The section `models` adds llama.cpp's server with a quantised file if it
is installed, sends greedy requests by every name, and compares the responses with those of the
servers themselves. `fallbacks` sends prompts that are too long for one model, and chats, for
which it has no template, and stops its server, first with SIGSTOP and then with SIGKILL.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

import httpx

from bench.fleet.nodes import gateway, read_counter
from bench.harness.processes import free_port, start, stop, wait_until_up
from bench.harness.vllm import MODEL, VllmServer, cores_of, started_together, vllm_server

OTHER: Final = "gemma3"
FILE: Final = "smollm2-q4_1"
"""The model of llama.cpp's server, and the name of its file without the ending."""

ALIASES: Final = {MODEL: "small", OTHER: "large", FILE: "packed"}
"""A second name of each model for clients."""

CONTEXT_TOKENS: Final = 256
"""The context of the model with a fallback. That of the other model is 2048 tokens."""

REQUESTS: Final = 8
TIMEOUT_S: Final = 120.0
OPEN_S: Final = 60.0
"""Maximum seconds after SIGCONT until the server gets requests again."""

Save = Callable[[Mapping[str, Any]], None]


class _Fleet(NamedTuple):
    """The vLLM servers and the upstreams, by model."""

    servers: Mapping[str, VllmServer]
    upstreams: dict[str, dict[str, Any]]


def _upstream(model: str, url: str) -> dict[str, Any]:
    return {"name": f"serves-{model}", "url": url, "aliases": {ALIASES[model]: model}}


@contextmanager
def _llama_cpp(models: Path, folder: Path) -> Iterator[dict[str, dict[str, Any]]]:
    """Run llama.cpp's server, and return its upstream by its model, or nothing without it."""
    program, file = models / "llama/llama-server", models / f"{FILE}.gguf"
    if not (program.exists() and file.exists()):
        yield {}
        return
    url = f"http://127.0.0.1:{(port := free_port())}"
    command = [str(program), "--model", str(file), "--alias", FILE, "--host", "127.0.0.1"]
    command += ["--port", str(port), "--threads", "1", "--ctx-size", "4096", "--parallel", "2"]
    process = start(command, None, folder / f"{FILE}.log", {})
    try:
        wait_until_up(process, f"{url}/health", None)
        yield {FILE: _upstream(FILE, url)}
    finally:
        stop(process)


@contextmanager
def _two_models(models: Path, folder: Path) -> Iterator[_Fleet]:
    cores = cores_of(2)
    lengths = {MODEL: "2048", OTHER: str(CONTEXT_TOKENS)}
    starting = [
        vllm_server(
            models,
            folder / f"{name}.log",
            *("--dtype", "bfloat16", "--max-model-len", length),
            model=name,
            core=core,
        )
        for (name, length), core in zip(lengths.items(), cores, strict=True)
    ]
    with started_together(starting) as running:
        servers = dict(zip(lengths, running, strict=True))
        upstreams = {name: _upstream(name, server.url) for name, server in servers.items()}
        yield _Fleet(servers, upstreams)


def _completion(model: str, number: int, tokens: int = 16) -> dict[str, Any]:
    prompt = f"Story {number}: once upon a time, in a town by the sea,"
    return {"model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0}


def measure(models: Path, folder: Path, save: Save) -> None:
    """Check which model each request gets.

    Args:
        save: gets the results.
    """
    with (
        _two_models(models, folder) as (servers, two),
        _llama_cpp(models, folder) as third,
        gateway(folder, [*two.values(), *third.values()]) as url,
        httpx.Client(timeout=TIMEOUT_S) as http,
    ):
        upstreams = two | third
        names = {name: model for model in upstreams for name in (model, ALIASES[model])}
        listed = [one["id"] for one in http.get(f"{url}/v1/models").json()["data"]]
        unknown = http.post(f"{url}/v1/completions", json=_completion("unknown", 0))
        before = {name: _successes(one) for name, one in servers.items()}
        found: dict[str, Any] = {
            "dtype": "bfloat16",
            "listed": listed,
            "list_is_union": sorted(listed) == sorted(names),
            "unknown_status": unknown.status_code,
            "unknown_error": unknown.json()["error"],
            "unknown_names_models": all(
                name in unknown.json()["error"]["message"] for name in names
            ),
            "names": {},
        }
        for name, model in names.items():
            counts = dict.fromkeys(("requests", "right_model", "right_upstream", "equal_text"), 0)
            for number in range(REQUESTS):
                got = http.post(f"{url}/v1/completions", json=_completion(name, number))
                own = http.post(
                    f"{upstreams[model]['url']}/v1/completions", json=_completion(model, number)
                ).json()
                answer = got.json()
                counts["requests"] += 1
                counts["right_model"] += answer["model"] == model
                upstream = got.headers["X-Draftgate-Upstream"]
                counts["right_upstream"] += upstream == f"serves-{model}"
                counts["equal_text"] += answer["choices"][0]["text"] == own["choices"][0]["text"]
            found["names"][name] = {"model": model, **counts}
        # Each model has two names, and every request is also sent to the server itself. Only the
        # metrics of vLLM count requests.
        expected = 4 * REQUESTS
        found["requests_counted_by_servers"] = {
            name: _successes(one) - before[name] for name, one in servers.items()
        }
        found["requests_expected_by_server"] = expected
        save(found)


def _successes(server: VllmServer) -> float:
    return read_counter(server.url, "vllm:request_success_total")


def table(found: Mapping[str, Any]) -> list[list[str]]:
    """Return the rows of a table, with its header."""
    rows = [["name", "model", "requests", "right model", "right upstream", "equal text"]]
    for name, one in found["names"].items():
        counts = (one["requests"], one["right_model"], one["right_upstream"], one["equal_text"])
        rows.append([name, one["model"], *map(str, counts)])
    return rows


def measure_fallbacks(models: Path, folder: Path, save: Save) -> None:
    """Check the fallbacks from a model whose context is short and whose server stops.

    Args:
        save: gets the results so far.
    """
    found: dict[str, Any] = {"dtype": "bfloat16", "context_tokens": CONTEXT_TOKENS}
    with (
        _two_models(models, folder) as (servers, upstreams),
        gateway(folder, [*upstreams.values()], fallbacks={OTHER: [MODEL]}) as url,
        httpx.Client(base_url=url, timeout=TIMEOUT_S) as http,
    ):
        found["short_prompts"] = _send(http, _short_requests())
        found["long_prompts"] = _send(http, _long_requests())
        found["chats"] = _send(http, _chats())
        stopped = servers[OTHER]
        stopped.signal(signal.SIGSTOP)
        try:
            found["stopped"] = _send(http, _short_requests())
        finally:
            stopped.signal(signal.SIGCONT)
        found["open_again_s"] = _open_again_s(http)
        found["continued"] = _send(http, _short_requests())
        stopped.signal(signal.SIGKILL)
        found["killed"] = _send(http, _short_requests())
        metrics = http.get("/metrics").text.splitlines()
        name = "draftgate_upstream_fallbacks_total"
        found["counters"] = [line for line in metrics if line.startswith(name + "{")]
        save(found)


def _short_requests() -> list[tuple[str, dict[str, Any]]]:
    return [("/v1/completions", _completion(OTHER, number)) for number in range(REQUESTS)]


def _long_requests() -> list[tuple[str, dict[str, Any]]]:
    """Return requests, whole and streamed, that exceed the short context."""
    words = "The sea was calm and the sky was grey. " * (CONTEXT_TOKENS // 8)
    return _both("/v1/completions", {**_completion(OTHER, 0), "prompt": words})


def _chats() -> list[tuple[str, dict[str, Any]]]:
    """Return requests of the other endpoints, for which the model has no chat template."""
    chat = {"model": OTHER, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 16}
    return [
        *_both("/v1/chat/completions", chat),
        *_both("/v1/messages", chat),
        *_both("/v1/responses", {"model": OTHER, "input": "Hi", "max_output_tokens": 16}),
    ]


def _both(path: str, body: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Return a request that is not streamed, and one that is."""
    return [(path, {**body, "temperature": 0, "stream": stream}) for stream in (False, True)]


def _send(http: httpx.Client, requests: list[tuple[str, dict[str, Any]]]) -> dict[str, Any]:
    """Send requests one after another, and count their statuses, models and reasons."""
    found: dict[str, Any] = {"requests": len(requests), "statuses": {}, "models": {}, "reasons": {}}
    longest_s = 0.0
    for path, body in requests:
        begin_s = time.perf_counter()
        got = http.post(path, json=body)
        longest_s = max(longest_s, time.perf_counter() - begin_s)
        values = {
            "statuses": str(got.status_code),
            "models": got.headers.get("X-Draftgate-Model", OTHER),
            "reasons": got.headers.get("X-Draftgate-Fallback", "none"),
        }
        for name, value in values.items():
            found[name][value] = found[name].get(value, 0) + 1
    return {**found, "longest_s": round(longest_s, 2)}


def _open_again_s(http: httpx.Client) -> float | None:
    """Return the seconds until the model gets its own requests again, or None without an end."""
    begin_s = time.perf_counter()
    while (now_s := time.perf_counter() - begin_s) < OPEN_S:
        got = http.post("/v1/completions", json=_completion(OTHER, 0, tokens=1))
        if got.status_code == httpx.codes.OK and "X-Draftgate-Fallback" not in got.headers:
            return round(now_s, 2)
        time.sleep(0.25)
    return None


def fallback_table(found: Mapping[str, Any]) -> list[list[str]]:
    """Return the rows of a table, with its header."""
    rows = [["requests", "number", "statuses", "models", "reasons", "longest s"]]
    for name, one in found.items():
        if isinstance(one, dict):
            counts = [_counts(one[key]) for key in ("statuses", "models", "reasons")]
            rows.append([name, str(one["requests"]), *counts, f"{one['longest_s']:.2f}"])
    return rows


def _counts(values: Mapping[str, int]) -> str:
    return ", ".join(f"{value} x{count}" for value, count in values.items())
