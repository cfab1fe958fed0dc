"""Admission counts the whole work of a request: all choices of all its prompts."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from draftgate.backends.checkpoints import SHIPPED_MODEL
from draftgate.backends.sim.profile import load_profile
from draftgate.backends.tokenizer import Tokenizer
from draftgate.backends.worker_config import WorkerConfig
from draftgate.gateway.http.requests.headers import Sender
from draftgate.gateway.http.requests.validation import parse_completion
from draftgate.gateway.served_model import ServedModel
from draftgate.policies.admission.types import AdmissionView, Admitted
from draftgate.policies.admission.wait_forecast import admit, forecast_wait
from draftgate.policies.quotas import Totals
from tests.examples import examples
from tests.gateway.harness import client
from tests.gateway.troubles import Dispatched, dispatching, run_scenario, simulated
from tests.gateway.upstreams import forwarding, upstream, whole

PROMPT = st.lists(st.integers(5, 200), min_size=1, max_size=40)
SERVED = ServedModel("m", Tokenizer(SHIPPED_MODEL), 4096)


class RecordingPolicy:
    """An admission policy that admits every request and keeps its views and decisions."""

    name = "recording"

    def __init__(self) -> None:
        self.views: list[AdmissionView] = []
        self.admitted: list[Admitted] = []

    def decide(self, view: AdmissionView, _now_s: float) -> Admitted:
        self.views.append(view)
        self.admitted.append(admit(view, forecast_wait(view)))
        return self.admitted[-1]

    def reconsider(self, *_: object) -> None:
        return None

    def learn(self, *_: object) -> None: ...


class Session:
    """A dispatcher that runs completions as HTTP does, and has learned the speed of its worker.

    Attributes:
        policy: its admission policy.
    """

    def __init__(self, dispatched: Dispatched) -> None:
        self._dispatched = dispatched
        self.policy = RecordingPolicy()
        dispatched.dispatcher.admission._policy = self.policy

    async def run(self, **fields: Any) -> tuple[float, Totals]:
        """Run a completion, and return its work for the queue and its share of the quota."""
        before = await self._dispatched.totals()
        body = json.dumps({"ignore_eos": True, **fields}).encode()
        job = parse_completion(body, SERVED, Sender(str(len(self.policy.views)))).job
        async with self._dispatched.dispatcher.run(job) as run:
            work_s = run.ticket_s * len(run.requests)
            async for _ in run.deltas:
                pass
        after = await self._dispatched.totals()
        return work_s, Totals(*(b - a for a, b in zip(before, after, strict=True)))


@asynccontextmanager
async def session(**settings: Any) -> AsyncIterator[Session]:
    config = WorkerConfig(speculation="off", **settings)
    async with dispatching(simulated({}), 1, config=config) as dispatched:
        opened = Session(dispatched)
        await opened.run(prompt="a b c", max_tokens=9)
        yield opened


@settings(max_examples=examples(20))
@given(
    prompts=st.lists(
        st.lists(st.integers(5, 200), min_size=1, max_size=40), min_size=1, max_size=4
    ),
    n=st.integers(1, 4),
    further=st.integers(0, 3),
    max_tokens=st.integers(1, 20),
)
@example(prompts=[[5]] * 4, n=4, further=3, max_tokens=20)
@example(prompts=[[5]] * 4, n=1, further=0, max_tokens=20)
@example(prompts=[[5]], n=4, further=0, max_tokens=20)
@example(prompts=[[5]], n=1, further=3, max_tokens=20)
def test_admission_counts_every_choice_of_every_prompt(
    prompts: list[list[int]], n: int, further: int, max_tokens: int
) -> None:
    """The forecast, the ticket for the queue and the quota count each prompt with all choices that
    it generates, also those that `best_of` drops."""

    async def scenario() -> tuple[AdmissionView, Admitted, float, Totals]:
        async with session() as opened:
            sent = {"prompt": prompts, "n": n, "best_of": n + further, "max_tokens": max_tokens}
            work_s, used = await opened.run(**sent)
            return opened.policy.views[-1], opened.policy.admitted[-1], work_s, used

    view, admitted, work_s, used = run_scenario(scenario())
    choices, prompt_tokens = len(prompts) * (n + further), sum(map(len, prompts))
    assert (view.sequences, view.prompt_tokens) == (choices, prompt_tokens)
    assert view.output_tokens == pytest.approx(max_tokens)  # its history has only full outputs
    speed = view.pool.speed
    residence_s = prompt_tokens * speed.prompt_token_s + choices * max_tokens * speed.tpot_s
    assert admitted.work_s == pytest.approx(residence_s / view.pool.max_sequences)
    assert work_s == pytest.approx(admitted.work_s)
    assert used.reserved == (n + further) * (prompt_tokens + len(prompts) * max_tokens)
    assert used.settled == prompt_tokens + choices * max_tokens


def test_a_batch_needs_no_more_memory_for_each_sequence() -> None:
    """The forecast knows that a sequence has one prompt, so a batch fits as often into the memory
    as its prompts do."""

    async def scenario() -> list[AdmissionView]:
        async with session(kv_bytes=64 * 16 * load_profile("cpu-demo").kv_token_bytes) as opened:
            for prompts in ([[5] * 100], [[5] * 100] * 4):
                await opened.run(prompt=prompts, max_tokens=20)
            return opened.policy.views[-2:]

    one, batch = run_scenario(scenario())
    assert one.pool.max_sequences == batch.pool.max_sequences == pytest.approx(64 * 16 / 120)


# --- upstreams ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "choices"),
    [
        ({"prompt": "a"}, 1),
        ({"prompt": ["a", "b", "c"]}, 3),
        ({"prompt": [[1, 2], [3]], "n": 2}, 4),
        ({"prompt": [1, 2, 3]}, 1),
        ({"prompt": ["a", "b", "c"], "n": 2, "best_of": 4}, 12),
        ({"prompt": "a", "best_of": 5}, 5),
    ],
)
async def test_upstream_requests_reserve_the_quota_of_all_choices(
    tmp_path: Path, fields: dict[str, Any], choices: int
) -> None:
    """A request for an upstream that generates more than its quota allows is refused, and one that
    generates as much as its quota allows is not."""
    path = tmp_path / "keys.yaml"
    body = {**fields, "max_tokens": 90}
    async with upstream(whole) as engine:
        for quota, status in ((90 * choices, 400), (90 * choices + 200, 200)):
            account = {"name": "slow", "key": "k", "tokens_per_minute": quota}
            path.write_text(json.dumps({"keys": [account]}))
            async with (
                forwarding(engine, api_keys_file=str(path)) as gateway,
                client(gateway) as http,
            ):
                headers = {"authorization": "Bearer k"}
                response = await http.post("/v1/completions", json=body, headers=headers)
                assert response.status_code == status, response.text
