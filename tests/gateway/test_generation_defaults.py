"""The sampling parameters of `generation_config.json`, which apply where a request sets none."""

from __future__ import annotations

import asyncio
import json
import math
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftgate.backends.checkpoints import SHIPPED_MODEL
from draftgate.backends.errors import CheckpointError
from draftgate.backends.generation_defaults import (
    BOUNDS,
    GenerationDefaults,
    read_generation_defaults,
)
from draftgate.backends.types import GenerationRequest
from draftgate.gateway.banner import banner
from draftgate.gateway.config import ServeConfig
from draftgate.gateway.config.models import plan_models
from draftgate.gateway.http.requests.limits import RANGES
from draftgate.policies.values import replace
from tests.gateway.harness import ScriptedBackend, client, running
from tests.gateway.tool_models import with_template
from tests.upstream_settings import at

MESSAGES = [{"role": "user", "content": "x"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "x"},
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/responses": {"input": "x"},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 16},
}
DEFAULTS = GenerationDefaults(0.3, 0.8, 7, 0.05, 1.2, 0.5, 0.25, 33)
SAMPLED = {
    "temperature": 0.3, "top_p": 0.8, "top_k": 7, "min_p": 0.05, "repetition_penalty": 1.2,
    "presence_penalty": 0.5, "frequency_penalty": 0.25,
}  # fmt: skip
"""The names of the defaults in requests and in `SamplingParams`."""


async def submitted(backend: ScriptedBackend, path: str, **more: Any) -> GenerationRequest:
    """Send a request to a node with one worker, and return what the worker receives."""
    backend.failure = None  # of an earlier node, which has stopped the worker
    async with running(backends=[backend]) as gateway, client(gateway) as http:
        pending = asyncio.ensure_future(http.post(path, json={**BODIES[path], **more}))
        request = await backend.submitted.get()
        backend.emit(request, "y", last=True)
        assert (await pending).status_code == 200
    return request


@pytest.fixture
def backend(scripted: ScriptedBackend) -> ScriptedBackend:
    """A worker whose model has a default for every parameter."""
    scripted.card = replace(scripted.card, defaults=DEFAULTS)
    return scripted


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("value", ["absent", None])
async def test_every_endpoint_applies_the_defaults(
    backend: ScriptedBackend, path: str, value: str | None
) -> None:
    """A request that omits the parameters, or sets them to null, gets those of the model."""
    unset = {} if value == "absent" else dict.fromkeys(SAMPLED)
    sampling = (await submitted(backend, path, **unset)).sampling
    assert {name: getattr(sampling, name) for name in SAMPLED} == SAMPLED


@pytest.mark.parametrize("path", BODIES)
async def test_a_parameter_of_the_request_takes_precedence(
    backend: ScriptedBackend, path: str
) -> None:
    """A request overrides single defaults, also by the value that would switch a filter off."""
    own = {"temperature": 1.0, "top_p": 1.0, "top_k": 0}
    sampling = (await submitted(backend, path, **own)).sampling
    assert {name: getattr(sampling, name) for name in own} == own
    assert sampling.min_p == DEFAULTS.min_p


async def test_a_default_length_limits_chats_as_far_as_the_context_has_room(
    backend: ScriptedBackend,
) -> None:
    """A chat without a limit gets that of the model, which never makes a request too long."""
    chat = "/v1/chat/completions"
    assert (await submitted(backend, chat)).sampling.max_tokens == DEFAULTS.max_new_tokens
    assert (await submitted(backend, chat, max_tokens=40)).sampling.max_tokens == 40
    long = replace(DEFAULTS, max_new_tokens=10_000)
    backend.card = replace(backend.card, defaults=long)
    request = await submitted(backend, chat)
    assert len(request.prompt_ids) + request.sampling.max_tokens == backend.kv_tokens


async def test_a_completion_keeps_the_default_length_of_the_api(backend: ScriptedBackend) -> None:
    """A completion without a limit has 16 tokens, as in vLLM and OpenAI's API."""
    assert (await submitted(backend, "/v1/completions")).sampling.max_tokens == 16


async def test_the_first_worker_decides_for_all_gateways(scripted: ScriptedBackend) -> None:
    """Workers that differ do not make the parameters depend on the order of discovery."""
    other = ScriptedBackend()
    other.card = replace(other.card, defaults=DEFAULTS)
    async with running(backends=[other, scripted]) as gateway:
        model = gateway.node.models[0]
        assert model.served.defaults() == DEFAULTS
        model.fleet.workers = model.fleet.workers[::-1]
        assert model.served.defaults() == DEFAULTS


async def test_gateways_of_a_pool_apply_the_defaults_of_the_worker(
    backend: ScriptedBackend,
) -> None:
    """A gateway without a checkpoint gets the defaults from the worker of another node."""
    async with (
        running(backends=[backend]) as peer,
        running(backend="peer", upstream=at(peer.url)) as gateway,
        client(gateway) as http,
    ):
        pending = asyncio.ensure_future(http.post("/v1/completions", json={"prompt": "x"}))
        request = await backend.submitted.get()
        backend.emit(request, "y", last=True)
        assert (await pending).status_code == 200
    assert request.sampling.temperature == DEFAULTS.temperature


async def test_a_node_shows_and_reports_the_defaults_of_a_checkpoint(tmp_path: Path) -> None:
    """The banner names the defaults, and a response reports the temperature that it used."""
    directory = with_template(tmp_path / "model", "qwen2_5")
    write(directory, temperature=0.25, top_p=0.5)
    async with running(model=str(directory)) as gateway, client(gateway) as http:
        assert "defaults     temperature 0.25, top_p 0.5" in banner(gateway)
        body = {"input": "x", "max_output_tokens": 4}
        reply = (await http.post("/v1/responses", json=body)).json()
        assert (reply["temperature"], reply["top_p"]) == (0.25, 0.5)
    off = {"model": str(directory), "generation_config": "none"}
    async with running(**off) as gateway, client(gateway) as http:
        assert "defaults  " not in banner(gateway)
        assert (await http.post("/v1/responses", json=body)).json()["temperature"] == 1.0


def write(directory: Path, **values: Any) -> Path:
    """Write a `generation_config.json` and return its path."""
    path = directory / "generation_config.json"
    path.unlink(missing_ok=True)
    path.write_text(json.dumps({"eos_token_id": 0, **values}))
    return path


def test_the_shipped_model_recommends_nothing() -> None:
    """Requests to the shipped model keep the defaults of the API."""
    assert read_generation_defaults("auto", SHIPPED_MODEL) == GenerationDefaults()


def test_the_setting_selects_the_file(tmp_path: Path) -> None:
    """`auto` reads the checkpoint's file if it exists, a path another file, and `none` no file."""
    own, other = tmp_path / "own", tmp_path / "other"
    own.mkdir()
    other.mkdir()
    assert read_generation_defaults("auto", own) == GenerationDefaults()
    write(own, temperature=0.5, top_k=None)
    path = write(other, temperature=0.75, max_new_tokens=9)
    assert read_generation_defaults("auto", own) == GenerationDefaults(0.5)
    for setting in (str(other), str(path)):
        found = read_generation_defaults(setting, own)
        assert found == GenerationDefaults(0.75, max_new_tokens=9)
    for setting in ("none", "vllm"):
        assert read_generation_defaults(setting, own) == GenerationDefaults()
    with pytest.raises(CheckpointError, match="missing"):
        read_generation_defaults(str(tmp_path / "missing"), own)


@pytest.mark.parametrize(("do_sample", "temperature"), [(False, 0.0), (True, 0.6), (None, 0.6)])
def test_a_checkpoint_without_sampling_is_greedy(
    tmp_path: Path, do_sample: bool | None, temperature: float
) -> None:
    """`do_sample: false` makes requests greedy, whatever temperature the file has besides."""
    write(tmp_path, do_sample=do_sample, temperature=0.6)
    assert read_generation_defaults("auto", tmp_path).temperature == temperature


VALUES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3)


@given(st.sampled_from(sorted(BOUNDS)), VALUES | st.lists(VALUES, max_size=2))
def test_a_value_is_used_or_named_in_an_error(
    tmp_path_factory: pytest.TempPathFactory, name: str, value: object
) -> None:
    """Every value of a file is null, used unchanged, or an error that names file and field."""
    directory = tmp_path_factory.mktemp("model")
    path = write(directory, **{name: value})
    outcome: object
    try:
        outcome = getattr(read_generation_defaults("auto", directory), name)
    except CheckpointError as error:
        outcome = str(error)
    if outcome != value or isinstance(value, bool):
        assert isinstance(outcome, str)
        assert outcome.startswith(f"{path}: {name} must be a")
        assert outcome.endswith("--generation-config none starts without the file")


def test_a_damaged_file_is_a_named_error(tmp_path: Path) -> None:
    """A file that is not JSON prevents the start, with its path in the message."""
    path = write(tmp_path)
    path.write_text("{")
    with pytest.raises(CheckpointError, match=str(path)):
        read_generation_defaults("auto", tmp_path)


def test_files_and_requests_have_the_same_bounds() -> None:
    """A default is valid exactly if a request may set it, and every default has bounds."""
    assert set(BOUNDS) == {field.name for field in fields(GenerationDefaults)}
    for name, (least, most) in BOUNDS.items():
        if name != "max_new_tokens":
            allowed = RANGES[name]
            assert (allowed.least, math.inf if allowed.most is None else allowed.most) == (
                least,
                most,
            )


def test_a_further_model_does_not_get_the_file_of_the_first() -> None:
    """A path concerns the first model. `none` concerns all models."""
    settings = {"model": "a", "models": ("b=b",)}
    for given_, expected in (("/a/file", "auto"), ("none", "none"), ("auto", "auto")):
        _, plan = plan_models(ServeConfig(**settings, generation_config=given_))
        assert plan.config.generation_config == expected
