"""The turns of the simulator on the event loop, which must be short for any prompt.

The tests count function calls in Python and C. This number does not depend on the machine and grows
with the work per block or token.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from draftgate.backends.core.prefix_cache import extend_chain
from draftgate.backends.sim.assembly import BLOCK_TOKENS, SimWorker, serving_worker
from draftgate.backends.sim.profile import load_profile
from draftgate.backends.token_ids import compact
from draftgate.backends.types import GenerationRequest, SamplingParams
from draftgate.backends.worker_config import WorkerConfig
from draftgate.policies.types import SpeculationMode, SpeculationPlan

STEP_TOKENS = 1024
LIVE = 4
PLAN = SpeculationPlan("off", SpeculationMode.OFF, None, 0, "a test")
BLOCK_BYTES = BLOCK_TOKENS * load_profile("cpu-demo").kv_token_bytes


def count_calls(work: Callable[[], Any]) -> tuple[Any, int]:
    """Call a function and return its result and its number of function calls."""
    count = 0

    def count_call(_frame: Any, event: str, _argument: Any) -> None:
        nonlocal count
        count += event in {"call", "c_call"}

    before = sys.getprofile()
    sys.setprofile(count_call)
    try:
        result = work()
    finally:
        sys.setprofile(before)
    return result, count


def request(name: str, prompt: tuple[int, ...], tokens: int) -> GenerationRequest:
    """Return a request with block hashes, as the gateway creates for long prompts."""
    hashes: list[bytes] = []
    extend_chain(hashes, "", prompt, BLOCK_TOKENS)
    params = SamplingParams(tokens, 0, ignore_eos=True)
    return GenerationRequest(name, compact(prompt), params, PLAN, block_hashes=tuple(hashes))


def most_calls_in_a_turn(built: SimWorker, long: GenerationRequest) -> int:
    """Return the most calls in a worker's turn between submission and end of a request."""
    worker, (_, most) = built.worker, count_calls(lambda: built.worker.submit(long, 0.0))

    def run_turn() -> bool:
        plan = worker.plan(0.0)
        assert plan is not None
        result = built.executor.execute(plan)
        deltas = worker.complete(plan, result, 0.0)
        return any(name == long.request_id and delta.finish_reason for name, delta in deltas)

    ended = False
    while not ended:
        ended, calls = count_calls(run_turn)
        most = max(most, calls)
    return most


def calls_beside_streams(prompt_tokens: int) -> list[int]:
    """Return the most calls in a turn for a prompt that is new, cached, or displaces another
    prompt."""
    config = WorkerConfig(
        speculation="off",
        max_model_len=1 << 20,
        max_step_tokens=STEP_TOKENS,
        kv_bytes=BLOCK_BYTES * (prompt_tokens // BLOCK_TOKENS + 64),
    )
    built = serving_worker(config)
    for index in range(LIVE):
        built.worker.submit(request(f"live-{index}", (index, 1, 2), 1000), 0.0)
    first = tuple(n % 1000 for n in range(prompt_tokens))
    prompts = {"new": first, "known": first, "other": tuple(reversed(first))}
    return [most_calls_in_a_turn(built, request(name, ids, 2)) for name, ids in prompts.items()]


def test_no_turn_takes_longer_for_a_longer_prompt() -> None:
    """No turn makes more calls for a prompt of 32,000 tokens than for a prompt of 8,000."""
    short, long = calls_beside_streams(8 << 10), calls_beside_streams(32 << 10)
    assert max(long) <= 1.1 * max(short)
