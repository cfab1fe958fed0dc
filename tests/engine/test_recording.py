"""`--record-acceptance` with the shipped model: equal under any policy, replayable, bounded."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterator
from contextlib import aclosing
from dataclasses import fields as fields_of
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest
from msgspec import structs
from typer.testing import CliRunner

from draftgate.backends.core.draft_recorder import TASK
from draftgate.backends.delta_reader import generate
from draftgate.backends.engine.backend import EngineBackend
from draftgate.backends.engine.load import load_engine
from draftgate.backends.engine.proposers.ngram_lookup import MAX_EVIDENCE
from draftgate.backends.recorded_run import RecordedCost, RecordedRequest, RecordedWorker
from draftgate.backends.recording import DIGITS, RecordingFile, Text
from draftgate.backends.sim.backend import SimBackend
from draftgate.backends.testing import collect, make_request
from draftgate.backends.token_ids import compact
from draftgate.backends.types import Delta, GenerationRequest, SamplingParams
from draftgate.backends.worker_config import WorkerConfig
from draftgate.gateway.cli import app
from draftgate.gateway.config.schema import ServeConfig
from draftgate.lab.sim.environment import SimEnvironment
from draftgate.lab.sim.recording import load_recording
from draftgate.lab.sim.virtual_time import run_virtual
from draftgate.policies.speculation.plan_reason import PlanCause, PlanFigures
from draftgate.policies.types import ServiceLevel, SpeculationMode, SpeculationPlan

PROMPT = """\
def area(shape):
    if shape.kind == "circle":
        return 3.14 * shape.radius * shape.radius
    if shape.kind == "square":
        return shape.side * shape.side

def outline(shape):
    if shape.kind == "circle":
        return 2 * 3.14 * shape.radius
"""

FOUR = SpeculationPlan("test", SpeculationMode.AUTO, "ngram", 4, "a test")

LENGTHS = (20, 29, 13, 32)


def config(path: Path, **settings: Any) -> WorkerConfig:
    return WorkerConfig(
        max_model_len=512,
        kv_bytes=8 << 20,
        threads=1,
        record_acceptance=str(path),
        record_acceptance_share=1.0,
        **settings,
    )


async def serve(settings: WorkerConfig, lengths: tuple[int, ...] = LENGTHS) -> None:
    """Run concurrent requests for continuations of one prompt, greedy and sampled."""
    backend = EngineBackend(settings)
    await backend.start()
    try:
        requests = [
            make_request(backend, PROMPT, max_tokens=length, seed=seed, speculation=FOUR)
            for seed, length in enumerate(lengths)
        ]
        sampling = replace(requests[0].sampling, temperature=0.0)
        requests[0] = replace(requests[0], sampling=sampling, tenant="acme")
        await asyncio.gather(*(collect(backend, request) for request in requests))
    finally:
        await backend.stop()


def read(path: Path) -> tuple[Text, ...]:
    return msgspec.json.decode(path.read_bytes(), type=RecordingFile).texts


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recording of four concurrent requests with `fixed:4`, in the engine's own process."""
    path = tmp_path_factory.mktemp("recorded") / "live.json"
    settings = config(
        path,
        speculation="fixed:4",
        own_process=True,
        record_acceptance_proposers=("draft_model",),
    )
    asyncio.run(serve(settings))
    return path


def test_recording_does_not_depend_on_drafts(recorded: Path, tmp_path: Path) -> None:
    """A worker with `off` in this process records the same drafts as a process with `fixed:4`."""
    path = tmp_path / "off.json"
    settings = config(path, speculation="off", record_acceptance_proposers=("draft_model",))
    asyncio.run(serve(settings))
    assert read(path) == read(recorded)


def test_recording_has_an_entry_for_each_output_position(recorded: Path) -> None:
    """Each text has one position per output token, and its drafts and trees are correct."""
    texts = read(recorded)
    assert tuple(text.length for text in texts) == LENGTHS
    assert [text.temperature for text in texts] == [0.0, 1.0, 1.0, 1.0]
    for text in texts:
        text.check()
        assert set(text.drafts) == {"ngram", "draft_model"}
        for name in text.drafts:
            assert sum(text.guess(name, at).agreed for at in range(text.length)) > 0
    assert any(text.drafts["ngram"].trees for text in texts)


def strings(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield from strings(item)
    elif isinstance(value, list):
        for item in value:
            yield from strings(item)


def test_recording_contains_no_text_and_no_tenant(recorded: Path) -> None:
    """The file has names of fields and policies, draft lengths and times, but no token ids."""
    content = json.loads(recorded.read_bytes())
    head = {"format", "source", "slots", "classes", "texts", "acceptance/2", content["source"]}
    fields = {"task", TASK, "temperature", "prompt", "drafts", "ngram", "draft_model"}
    columns = {"evidence", "agreement", "proposed", "agreed", "tree", "trees"}
    structures = (RecordedWorker, RecordedCost, RecordedRequest, PlanFigures)
    of_run = {name for one in structures for name in one.__struct_fields__}
    of_run |= {field.name for one in (SpeculationPlan, ServiceLevel) for field in fields_of(one)}
    of_run |= {"worker", "calls", "arrive", "plan", "apply", "end", "fixed:4", "slack", "test"}
    of_run |= {"sparse_self", "auto", "", *PlanCause}
    for found in strings(content):
        known = head | fields | columns | of_run
        assert found in known or set(found) <= set(DIGITS), found
    for text in read(recorded):
        assert max(text.drafts["ngram"].evidence) <= MAX_EVIDENCE
        assert max(text.drafts["draft_model"].evidence) <= 1000


def test_simulate_replays_the_recording(recorded: Path, tmp_path: Path) -> None:
    """The command `simulate --recording` accepts drafts of the recorded texts."""
    out = tmp_path / "out.json"
    flags = ["--recording", str(recorded), "--requests", "8", "--rate", "20"]
    names = ["--speculation", "off,fixed:4,oracle", "--proposer", "ngram", "--json", str(out)]
    result = CliRunner().invoke(app, ["simulate", *flags, *names])
    assert result.exit_code == 0, result.output
    mean_s = {
        name: summary["latency_s"]["mean"]
        for name, summary in json.loads(out.read_text())["policies"].items()
    }
    assert mean_s["oracle"] < mean_s["off"]


def accepted_per_step(deltas: list[Delta]) -> list[int]:
    return [step.accepted for delta in deltas for step in delta.steps]


def test_replayed_stream_accepts_what_the_live_stream_accepted(tmp_path: Path) -> None:
    """One stream with `fixed:4` has the same accepted tokens in each step, live and replayed."""
    path, length = tmp_path / "one.json", 120
    backend = EngineBackend(config(path, speculation="fixed:4"))

    async def live() -> list[Delta]:
        await backend.start()
        request = make_request(backend, PROMPT, max_tokens=length, seed=3, speculation=FOUR)
        sampling = replace(request.sampling, temperature=0.6)
        async with aclosing(
            generate(backend, replace(request, sampling=sampling, traced=True))
        ) as deltas:
            found = [delta async for delta in deltas]
        await backend.stop()
        return found

    accepted = accepted_per_step(asyncio.run(live()))
    (text,) = read(path)
    assert text.length == length
    assert any(tree.parents[:4] != "0123" for tree in text.drafts["ngram"].trees)

    def starts_at_the_beginning(seed: int) -> bool:
        random = Random(f"{seed}/0")
        return random.randrange(1) == 0 and random.randrange(length) == 0

    seed = next(filter(starts_at_the_beginning, range(100_000)))
    environment = SimEnvironment(belief_error=0.0, recording=load_recording(str(path)))
    settings = WorkerConfig(speculation="fixed:4", profile="h100-8b", proposer="ngram")

    async def replayed() -> tuple[list[int], Delta]:
        simulated = SimBackend(settings, build=environment.build_worker)
        await simulated.start()
        sampling = SamplingParams(length, seed, 0.6, ignore_eos=True)
        request = GenerationRequest(f"{TASK}/0", compact((1, 2, 3)), sampling, FOUR)
        *_, last = [delta async for delta in generate(simulated, request)]
        await simulated.stop()
        return list(environment.log.pop(request.request_id).tokens), last

    tokens, last = run_virtual(replayed())
    assert tokens == [count + 1 for count in accepted]
    assert last.outcome.num_accepted_tokens == sum(accepted) > 10


def test_recording_stops_at_its_size_with_one_log_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A worker keeps serving after the file has reached its size, and warns once."""
    path, limit = tmp_path / "small.json.gz", 2056
    settings = structs.replace(
        config(path), record_acceptance_share=0.9999, record_acceptance_bytes=limit
    )
    with caplog.at_level(logging.WARNING):
        asyncio.run(serve(settings, (12, 12, 12, 12, 12, 12, 12, 12)))
    recording = load_recording(str(path))
    kept = recording.texts(TASK, 1.0)
    assert 0 < len(kept) < 7
    lines = [record.message for record in caplog.records if "--record-acceptance" in record.message]
    assert len(lines) == 1
    assert f"{limit} bytes" in lines[0]
    assert len(recording._file.encode()) <= limit


def test_restarted_worker_continues_its_recording(tmp_path: Path) -> None:
    """A second run adds its texts, with tenants if chosen, and another model is rejected."""
    path = tmp_path / "again.json"
    asyncio.run(serve(config(path), (8, 9)))
    asyncio.run(serve(config(path, record_acceptance_tenants=True), (10, 11)))
    assert [(text.prompt, text.length, text.tenant) for text in read(path)] == [
        (0, 8, ""),
        (1, 9, ""),
        (2, 10, "acme"),
        (3, 11, ""),
    ]
    file = msgspec.json.decode(path.read_bytes(), type=RecordingFile)
    path.write_bytes(msgspec.structs.replace(file, source="another model").encode())
    with pytest.raises(ValueError, match=r"recorded by another worker \(another model\)"):
        load_engine(config(path))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"verify": "rejection"}, "needs --verify coupled"),
        ({"record_acceptance_proposers": ("sparse_self",)}, "sparse_self reads the KV cache"),
        ({"record_acceptance": "/nowhere/file.json"}, "cannot write to the directory /nowhere"),
    ],
)
def test_worker_refuses_a_recording_that_would_not_replay(
    tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    """Loading fails before the weights are read, and the error names the setting."""
    with pytest.raises(ValueError, match=message):
        load_engine(msgspec.structs.replace(config(tmp_path / "r.json"), **settings))


def test_worker_refuses_an_unknown_proposer(tmp_path: Path) -> None:
    """The error lists the proposers that the worker can record."""
    settings = config(tmp_path / "r.json", record_acceptance_proposers=("medusa",))
    with pytest.raises(ValueError, match=r"no proposer 'medusa'; known: draft_model, ngram"):
        load_engine(settings)


def test_other_backends_refuse_to_record() -> None:
    """The error names the backend that records."""
    settings = ServeConfig(backend="sim", record_acceptance="r.json")
    with pytest.raises(ValueError, match="needs --backend engine, not --backend sim"):
        settings.worker_configs()
