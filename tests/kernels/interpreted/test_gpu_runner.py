"""The GPU runner in the interpreter, compared with the CPU runner."""

from __future__ import annotations

import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from draftgate.backends.engine import runner as cpu_module
from draftgate.backends.engine import transfer
from draftgate.backends.engine.gpu import runner as gpu_module
from draftgate.backends.engine.quantisation.fp8_kv import FP8
from draftgate.backends.engine.warmup import rehearse_tree
from draftgate.backends.types import GenerationRequest, TokenLogprob
from draftgate.policies.protocols import SpeculationPolicy
from draftgate.policies.registry import speculation_policy
from tests.engine.harness import HostileProposer, Outcome, RandomSlots, Setup, request
from tests.engine.tiny_model import (
    TINY_EXPERTS,
    VOCAB,
    cpu_engine,
    gpu_engine,
    tiny_config,
    tiny_weights,
)

# A single layer is enough for tests of the schedule of steps.
ONE_LAYER = {"num_layers": 1, "windows": (None,), "num_heads": 2, "num_kv_heads": 1}

SAMPLINGS = {
    "greedy": {"temperature": 0.0},
    "filtered": {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "logprobs": 2},
    "changed": {
        "temperature": 0.9,
        "max_tokens": 12,
        "repetition_penalty": 1.3,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.2,
        "logit_bias": ((5, 2.0), (9, -3.0), (0, 2.0)),
        "min_tokens": 4,
        "ignore_eos": False,
    },
    "stopped": {"temperature": 0.8, "stop": ("BA", "Z", "QX"), "logprobs": 0, "ignore_eos": False},
}


def requests(policy: SpeculationPolicy, **of_all: object) -> list[GenerationRequest]:
    """Return a request per sampling, with repetitive and partly shared prompts."""
    rng = random.Random(3)
    shared = [rng.randrange(VOCAB) for _ in range(18)]
    return [
        request(
            name,
            (shared + [rng.randrange(VOCAB) for _ in range(4)] * 3)[index:],
            policy,
            seed=index,
            **{"n": 1 + index % 2, "max_tokens": 7, **sampling, **of_all},
        )
        for index, (name, sampling) in enumerate(SAMPLINGS.items())
    ]


def setup(policy: SpeculationPolicy, **bounds: int) -> Setup:
    """Return a setup whose drafts are correct, wrong and branching."""
    proposers = lambda _: {"ngram": HostileProposer(VOCAB, random.Random(1))}  # noqa: E731
    return Setup(policy, proposers, **{"max_num_seqs": 4, "num_blocks": 64, **bounds})


def assert_equal(found: Outcome, expected: Outcome) -> None:
    """Check equal tokens and texts, log probabilities up to rounding, and no leaked block."""
    assert found.tokens == expected.tokens
    assert found.text == expected.text
    assert found.finish_reasons == expected.finish_reasons
    assert found.leaked_blocks == expected.leaked_blocks == 0
    for key, entries in expected.logprobs.items():
        for one, other in zip(found.logprobs[key], entries, strict=True):
            assert_close(one, other)


def assert_close(found: TokenLogprob, expected: TokenLogprob) -> None:
    assert found.token_id == expected.token_id
    assert found.logprob == pytest.approx(expected.logprob, abs=1e-5)
    assert [token for token, _ in found.top] == [token for token, _ in expected.top]


@pytest.mark.parametrize("kv_dtype", [None, FP8], ids=str)
def test_gpu_runner_gives_the_tokens_of_the_cpu_runner(kv_dtype: torch.dtype | None) -> None:
    """The runners agree with chunks, prefix cache, preemption, trees and stop strings, also with a
    KV cache in FP8."""

    def outcome(make: object) -> Outcome:
        chosen = RandomSlots(random.Random(2))
        bounds = {"max_step_tokens": 24, "num_blocks": 7}
        return make(config, weights, setup(chosen, **bounds), kv_dtype).run(requests(chosen))

    config = tiny_config(windows=(None, 24), num_heads=2, num_kv_heads=1)
    weights = tiny_weights(config)
    expected, found = outcome(cpu_engine), outcome(gpu_engine)
    assert_equal(found, expected)
    assert min(expected.preemptions, found.preemptions) > 0
    # Steps that are planned ahead have no drafts, so the runners verify different drafts.
    for each in (expected, found):
        assert min(each.accepted, each.rejected) > 0


def test_experts_of_a_gpu_give_the_tokens_of_the_cpu_runner() -> None:
    """The runners agree for a mixture of experts, whose rows of padding have no expert."""
    config = tiny_config(**ONE_LAYER, experts=replace(TINY_EXPERTS, layers=frozenset({0})))
    chosen = speculation_policy("fixed:3")
    expected, found = (
        make(config, tiny_weights(config, grouped=grouped), setup(chosen)).run(requests(chosen)[:2])
        for make, grouped in ((cpu_engine, False), (gpu_engine, True))
    )
    assert_equal(found, expected)


def test_rehearsed_tree_launches_the_moves_of_accepted_paths(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No request with the first tree waits for the kernel that moves its keys and values."""
    moved: list[torch.Size] = []
    monkeypatch.setattr(gpu_module, "kv_move", lambda _, sources, __: moved.append(sources.shape))
    config = tiny_config(**ONE_LAYER)
    rehearse_tree(gpu_engine(config, tiny_weights(config), setup(speculation_policy("off"))).runner)
    assert moved


def test_step_launched_before_its_tokens_are_known_gives_the_same_tokens() -> None:
    """The runner launches most steps during the previous step, and the outcome is the same."""
    config = tiny_config(**ONE_LAYER)
    weights, chosen = tiny_weights(config), speculation_policy("off")
    plain = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
    wanted = requests(chosen, **plain)
    expected = cpu_engine(config, weights, setup(chosen)).run(wanted)
    engine = gpu_engine(config, weights, setup(chosen))
    behind, launch = [], engine.runner.launch
    engine.runner.launch = lambda plan, step=None: (behind.append(step), launch(plan, step))[1]
    assert_equal(engine.run(wanted), expected)
    assert sum(step is not None for step in behind) > len(behind) // 2


def test_step_can_be_fetched_after_later_launches() -> None:
    """A fetch after later launches returns the result of the fetched step."""
    config = tiny_config(**ONE_LAYER)
    chosen = speculation_policy("off")
    engines = [gpu_engine(config, tiny_weights(config), setup(chosen)) for _ in range(2)]
    for engine in engines:
        for one in requests(chosen, n=1, logprobs=1)[:2]:
            engine.worker.submit(one)
    plans = [engine.worker.plan() for engine in engines]
    late, at_once = engines[0].runner, engines[1].runner
    first = late.launch(plans[0])
    late.launch(plans[0])
    expected = at_once.execute(plans[1])
    result = late.fetch(first)
    assert result.emitted == expected.emitted
    assert result.logprobs == expected.logprobs
    assert result.step_s > 0
    torch.testing.assert_close(
        torch.cat(late._pool.layers)[:, :64], torch.cat(at_once._pool.layers)[:, :64]
    )


@pytest.mark.parametrize("is_gpu", [False, True])
def test_step_time_excludes_packing(monkeypatch: pytest.MonkeyPatch, *, is_gpu: bool) -> None:
    """The time of a step begins after the host has packed its input."""
    now_s = [0.0]
    clock = SimpleNamespace(perf_counter=lambda: now_s[0])

    def taking(module: object, name: str, seconds: float) -> None:
        work = getattr(module, name)

        def take(*args: object, **more: object) -> object:
            now_s[0] += seconds
            return work(*args, **more)

        monkeypatch.setattr(module, name, take)

    engine = (gpu_engine if is_gpu else cpu_engine)(
        tiny_config(**ONE_LAYER),
        tiny_weights(tiny_config(**ONE_LAYER)),
        setup(speculation_policy("off")),
    )
    engine.worker.submit(requests(speculation_policy("off"), n=1)[0])
    module, packing, device_work = (
        (gpu_module, "pack_walks", "accept_walk")
        if is_gpu
        else (cpu_module, "build_inputs", "draw_tokens")
    )
    monkeypatch.setattr(cpu_module, "time", clock)
    monkeypatch.setattr(transfer, "time", clock)
    taking(module, packing, 5.0)
    taking(module, device_work, 2.0)
    assert engine.runner.execute(engine.worker.plan()).step_s == pytest.approx(2.0)
