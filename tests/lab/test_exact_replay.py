"""Recorded runs of simulated workers replay exactly, and other runs are refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import Phase, given, settings
from msgspec import UNSET, structs

from draftgate.backends.checkpoints import SHIPPED_MODEL
from draftgate.backends.core.draft_recorder import DraftRecorder
from draftgate.backends.core.pipeline import Pipeline
from draftgate.backends.core.recorded_blocks import RecordedKvBlocks
from draftgate.backends.core.run_recorder import RecordedWorkerCore, RunRecorder
from draftgate.backends.core.scheduler import Scheduler, SchedulerConfig
from draftgate.backends.core.steps import StepPlan, StepResult
from draftgate.backends.engine.recording import AcceptanceRecording
from draftgate.backends.recorded_run import (
    Applied,
    Cancelled,
    Ended,
    Paced,
    Planned,
    RecordedCost,
    RecordedWorker,
    seconds_at,
    ticks_at,
)
from draftgate.backends.recording import SLOTS, RecordingFile, read_recording
from draftgate.backends.sim.device_model import ProfileDevice
from draftgate.backends.sim.model import SimExecutor, SimProposer
from draftgate.backends.sim.profile import DraftCost, load_profile
from draftgate.backends.sim.tokens import SimulatedTokens
from draftgate.backends.token_ids import compact
from draftgate.backends.tokenizer import Tokenizer
from draftgate.backends.types import (
    Delta,
    GenerationRequest,
    GrammarKind,
    GrammarSpec,
    Pace,
    ResumedChoice,
    SamplingParams,
    SpeculationOutcome,
)
from draftgate.lab.sim.exact_replay import ReplayDiffers, replay_exactly
from draftgate.lab.sim.recorded_run import RecordedRun
from draftgate.lab.sim.recording import RECORDINGS, ReplayedAcceptance, load_recording
from draftgate.policies.costs.step_cost import StepCost
from draftgate.policies.registry import batching_policy, speculation_policy
from draftgate.policies.types import RequestView, ServiceLevel, SpeculationMode, SpeculationPlan

PROFILE = load_profile("cpu-demo")
TOKENIZER = Tokenizer(SHIPPED_MODEL)
DRAFTS = {"ngram": DraftCost(), "draft_model": DraftCost(StepCost((1, 8), (2e-4, 3e-4)))}
NAMES = tuple(DRAFTS)


class RecordedServer:
    """A simulated worker with a recording of all its requests, as a server has it."""

    def __init__(
        self,
        path: Path,
        policy: str = "auto",
        *,
        blocks: int = 4096,
        max_bytes: int = 1 << 20,
        recorded: tuple[str, ...] = NAMES,
        seed: int = 0,
        ahead: bool = False,
    ) -> None:
        device = ProfileDevice(replace(PROFILE, draft=DRAFTS))
        self.outcomes: dict[str, list[SpeculationOutcome]] = {}
        self._policy = speculation_policy(policy)
        self._random, self.now_s = Random(seed), 54321.9
        self._tokens = SimulatedTokens(range(2, 256))
        self._acceptance = ReplayedAcceptance(load_recording("draftgate-demo"))
        kv = RecordedKvBlocks(blocks, 16)
        run = RunRecorder(kv, recorded)
        scheduler = Scheduler(
            SchedulerConfig(8, 256, frozenset({7})),
            kv,
            self._policy,
            run.watch(self._proposers(device)),
            PROFILE.cost,
            batching_policy("slack"),
        )
        self.worker = RecordedWorkerCore(scheduler, TOKENIZER, 4096, run=run)
        conditions = RecordedWorker(
            policy,
            "slack",
            NAMES,
            run.computing,
            8,
            256,
            blocks,
            16,
            RecordedCost.from_cost(PROFILE.cost),
        )
        copies = self._proposers(ProfileDevice(PROFILE))
        self.recording = AcceptanceRecording(
            path,
            RecordingFile(
                format="acceptance/2", source="a test", slots=SLOTS, worker=conditions, texts=()
            ),
            max_bytes,
            DraftRecorder({name: copies[name] for name in recorded}),
            run,
            [],
        )
        self._executor = SimExecutor(self._tokens, device)
        self._pipeline = Pipeline(
            self.worker, self, self._deliver, self if ahead else None, self._clock
        )

    def submit(self, name: str, prompt: tuple[int, ...], output: int, **chosen: Any) -> None:
        """Queue a request, with the plan that the gateway would make now."""
        service = chosen.pop("service", ServiceLevel())
        view = RequestView(len(prompt), output, 0.0, service=service)
        plan = self._policy.decide(view, self.worker.load())
        sampling = SamplingParams(output, seed=len(name) + sum(prompt), temperature=0.0)
        request = GenerationRequest(
            f"code/{name}", compact(prompt), sampling, plan, service=service
        )
        request = replace(request, **chosen)
        self.worker.submit(request, self._clock())
        self.recording.begin(request)

    def cancel(self, name: str) -> None:
        self.worker.cancel(f"code/{name}")
        self.recording.cancel(f"code/{name}")

    def set_pace(self, name: str, pace: Pace) -> None:
        self.worker.set_pace(f"code/{name}", pace)

    def step(self) -> bool:
        return self._pipeline.step()

    def execute(self, plan: StepPlan) -> StepResult:
        """Run a step with noise."""
        result = self._executor.execute(plan)
        step_s = result.step_s * self._random.uniform(0.8, 1.3)
        self.now_s += step_s
        return replace(result, step_s=step_s)

    def launch(self, plan: StepPlan, previous: StepPlan | None = None) -> StepPlan:
        """Start a step, whose result `fetch` computes."""
        return plan

    def fetch(self, step: StepPlan) -> StepResult:
        return self.execute(step)

    def close(self) -> RecordingFile:
        self.recording.close()
        return read_recording(self.recording._path)

    def _clock(self) -> float:
        self.now_s += self._random.expovariate(1e4)
        return self.now_s

    def _deliver(self, batch: list[tuple[str, Delta]]) -> None:
        self.recording.observe(batch)
        for request_id, delta in batch:
            if delta.outcome is not None:
                self.outcomes.setdefault(request_id, []).append(delta.outcome)

    def _proposers(self, device: ProfileDevice) -> dict[str, SimProposer]:
        return {
            name: SimProposer(name, self._tokens, self._acceptance, cost, device)
            for name, cost in DRAFTS.items()
        }


def act_at_random(server: RecordedServer, random: Random, number: int) -> None:
    """Submit, cancel, slow down or run requests."""
    name = f"r{random.randrange(max(number - 8, 0), number + 1)}"
    action = random.choice(("submit", "submit", "submit", "cancel", "pace", "pace"))
    if action == "submit":
        prompt = tuple(5 + (at // 16) % 3 for at in range(random.randint(1, 90)))
        service = ServiceLevel(tpot_s=random.choice((None, 0.001, 0.02)))
        server.submit(
            f"r{number}",
            prompt,
            random.randint(1, 60),
            service=service,
            tenant=random.choice(("", "acme")),
            n=random.randint(1, 2),
        )
    elif action == "cancel":
        server.cancel(name)
    else:
        server.set_pace(name, random.choice(list(Pace)))
    for _ in range(random.randint(1, 20)):
        server.step()


@settings(max_examples=16, phases=[Phase.explicit, Phase.generate])
@given(
    policy=st.sampled_from(["auto", "auto:unweighted", "fixed:3", "adaptive_verification"]),
    blocks=st.sampled_from([14, 40, 4096]),
    seed=st.integers(0, 1 << 16),
    ahead=st.booleans(),
)
def test_any_recorded_run_replays_exactly(
    policy: str, blocks: int, seed: int, *, ahead: bool
) -> None:
    """A replay has the live steps and outcomes for any arrivals, paces, memory and launches."""
    random, count = Random(seed), 40
    with TemporaryDirectory() as directory:
        server = RecordedServer(
            Path(directory) / "run.json", policy, blocks=blocks, seed=seed, ahead=ahead
        )
        server.submit("first", (3, 4, 5), 20)
        for number in range(count):
            act_at_random(server, random, number)
        for number in range(count):
            server.set_pace(f"r{number}", Pace.FULL)
        while server.step():
            pass
        run = RecordedRun(server.close())
    outcomes = [one.outcome for one in replay_exactly(run).requests if one.outcome is not None]
    live = [outcome for ended in server.outcomes.values() for outcome in ended]
    assert sorted(map(counts, outcomes)) == sorted(map(counts, live))


def counts(outcome: SpeculationOutcome) -> tuple[Any, ...]:
    revisions = [(one.on, one.cause, one.output_tokens, one.worth) for one in outcome.revisions]
    return outcome.num_drafted_tokens, outcome.acceptance_histogram, revisions


def serve_some(server: RecordedServer, **chosen: Any) -> RecordingFile:
    """Run three requests, the second of which has these fields."""
    for number, fields in enumerate(({}, chosen, {})):
        server.submit(f"r{number}", (3, 4, 5 + number), 30, **fields)
        server.step()
    while server.step():
        pass
    return server.close()


@pytest.mark.parametrize(
    ("chosen", "texts", "reason"),
    [
        ({"grammar": GrammarSpec(GrammarKind.REGEX, "a+")}, 2, "a request had a grammar"),
        ({"sampling": SamplingParams(30, 1, stop=("end",))}, 3, "a request had a stop text"),
        ({"resumed": (ResumedChoice(0, (3,)),)}, 3, "a request was resumed from another worker"),
        ({"sampling": SamplingParams(0, 1)}, 2, "a request generated nothing"),
        ({"sampling": SamplingParams(9, 1, prompt_logprobs=0)}, 3, "a request computed a cached"),
    ],
)
def test_run_with_an_unrecorded_request_is_refused(
    chosen, texts: int, reason: str, tmp_path: Path
) -> None:
    """The file keeps the texts but no calls, and the error says why the run cannot be replayed."""
    file = serve_some(RecordedServer(tmp_path / "run.json"), **chosen)
    assert (len(file.texts), file.calls) == (texts, UNSET)
    with pytest.raises(ValueError, match=f"cannot replay the run of this recording: {reason}"):
        RecordedRun(file)


def test_run_with_an_unrecorded_proposer_is_refused(tmp_path: Path) -> None:
    """The error names the proposer that drafted without being recorded."""
    server = RecordedServer(tmp_path / "run.json", "fixed:2", recorded=("ngram",))
    plan = SpeculationPlan("a test", SpeculationMode.DRAFT_MODEL, "draft_model", 2, "a test")
    file = serve_some(server, speculation=plan)
    with pytest.raises(ValueError, match="draft_model drafted, and its drafts are not recorded"):
        RecordedRun(file)


def test_recording_without_a_run_is_refused() -> None:
    """A shipped recording has texts, but no arrivals and steps."""
    file = read_recording(RECORDINGS / "draftgate-demo.json")
    with pytest.raises(ValueError, match="it contains no arrivals and steps"):
        RecordedRun(file)


def test_run_of_a_killed_server_is_refused(tmp_path: Path) -> None:
    """The error names the request whose text was not written."""
    file = serve_some(RecordedServer(tmp_path / "run.json", "off"))
    cut = structs.replace(file, texts=file.texts[:-1])
    with pytest.raises(ValueError, match="lacks the end of request 2, because the server was kill"):
        replay_exactly(RecordedRun(cut))


def test_replay_of_another_step_names_it(tmp_path: Path) -> None:
    """A recorded draft length that the policy does not choose is an error with its step."""
    file = serve_some(RecordedServer(tmp_path / "run.json", "fixed:3"))
    calls = list(file.calls or ())
    steps = [at for at, call in enumerate(calls) if isinstance(call, Planned) and call.work]
    at = next(at for at in steps if any(drafted for *_, drafted in calls[at].work))
    changed = tuple((number, fed, 1) for number, fed, _ in calls[at].work)
    calls[at] = structs.replace(calls[at], work=changed)
    with pytest.raises(ReplayDiffers, match=rf"step {steps.index(at) + 1} of the replay has"):
        replay_exactly(RecordedRun(structs.replace(file, calls=tuple(calls))))


def test_run_beside_another_model_has_texts_without_a_replay(tmp_path: Path) -> None:
    """Steps of other models between those of the worker end the record of calls, with a reason."""
    server = RecordedServer(tmp_path / "run.json", "fixed:2")
    server.submit("r0", (3, 4, 5), 20)
    server.step()
    server.worker.interrupt()
    while server.step():
        pass
    file = server.close()
    assert len(file.texts) == 1
    assert "another model used the device" in str(file.gap)
    with pytest.raises(ValueError, match="another model used the device"):
        RecordedRun(file)


@settings(max_examples=12, phases=[Phase.explicit, Phase.generate])
@given(st.integers(1_000, 30_000))
def test_file_never_exceeds_its_size(max_bytes: int) -> None:
    """A file of any size has whole texts, and either a complete run or the reason for its lack."""
    with TemporaryDirectory() as directory:
        path = Path(directory) / "run.json"
        server = RecordedServer(path, "fixed:2", max_bytes=max_bytes)
        for number in range(12):
            server.submit(f"r{number}", (3, 4, number), 20)
            server.step()
        while server.step():
            pass
        server.recording.close()
        if not path.exists():  # not even one text fits
            return
        assert path.stat().st_size <= max_bytes
        file = read_recording(path)
    for text in file.texts:
        text.check()
    if file.calls is UNSET:
        # All texts may fit although the calls of the run do not.
        assert "reached --record-acceptance-bytes" in str(file.gap)
    else:
        assert len(replay_exactly(RecordedRun(file)).requests) == 12


NUMBERS = st.integers(0, 1 << 40)
ROWS = st.lists(st.tuples(NUMBERS, NUMBERS, NUMBERS), max_size=3).map(tuple)
SECONDS = st.floats(0, 1e6)
CALLS = st.one_of(
    st.builds(Planned, NUMBERS, ROWS, st.lists(SECONDS).map(tuple), ahead=st.booleans()),
    st.builds(Applied, NUMBERS, SECONDS, st.lists(NUMBERS).map(tuple)),
    st.builds(
        Ended, NUMBERS, NUMBERS, st.booleans(), st.lists(st.tuples(NUMBERS, NUMBERS)).map(tuple)
    ),
    st.builds(Cancelled, NUMBERS),
    st.builds(Paced, NUMBERS, st.sampled_from(list(Pace))),
)


@given(st.lists(CALLS).map(tuple))
def test_encoded_run_is_decoded_unchanged(calls) -> None:
    """A recording that is written and read again has the same calls and times."""
    worker = RecordedWorker(
        "auto", "slack", NAMES, (), 8, 256, 64, 16, RecordedCost.from_cost(PROFILE.cost)
    )
    file = RecordingFile(
        format="acceptance/2", source="a test", slots=16, worker=worker, texts=(), calls=calls
    )
    assert msgspec.json.decode(file.encode(), type=RecordingFile) == file


@given(st.floats(0, 1e7), st.floats(0, 1e7))
def test_differences_of_times_do_not_depend_on_the_origin(one_s: float, other_s: float) -> None:
    """A replay that starts at 0 computes the differences of the live run exactly."""
    one, other = ticks_at(one_s), ticks_at(other_s)
    assert seconds_at(one) - seconds_at(other) == seconds_at(one - other)
    assert 0.0 <= one_s - seconds_at(one) < 1e-6
