"""Log probabilities of prompts equal transformers, and their bits do not depend on the batch."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from draftgate.backends.checkpoints import SHIPPED_MODEL
from draftgate.backends.engine.prompt_logprobs import SCORED_ROWS
from draftgate.backends.prompt_logprobs import PromptLogprobs
from draftgate.backends.types import FinishReason, GenerationRequest
from draftgate.policies.registry import speculation_policy
from draftgate.policies.speculation.baselines import Off
from tests.engine.harness import Engine, Model, Setup, request, run
from tests.engine.test_embedding import RandomModel
from tests.engine.test_model_families import random_model

MODEL = Model(SHIPPED_MODEL)
RNG = random.Random(9)
TEXTS = [
    [RNG.randrange(MODEL.tokenizer.vocab_size) for _ in range(length)]
    for length in (2, 3, 16, 17, 40, 150, 300)
]
ALTERNATIVES = 3


def scoring_requests(**sampling: object) -> list[GenerationRequest]:
    """Return a request for the log probabilities of each text."""
    wanted = {"max_tokens": 0, "prompt_logprobs": ALTERNATIVES, **sampling}
    return [request(f"s{index}", text, Off(), **wanted) for index, text in enumerate(TEXTS)]


def generating_requests(count: int, **sampling: object) -> list[GenerationRequest]:
    """Return requests with drafts, whose prompts share prefixes with the texts."""
    policy = speculation_policy("fixed:3")
    return [
        request(f"g{index}", TEXTS[-1 - index % 3][: 30 + index], policy, seed=index, **sampling)
        for index in range(count)
    ]


@pytest.fixture(scope="module")
def alone() -> dict[str, PromptLogprobs]:
    """The log probabilities of each text, in one step on a new worker."""
    found = {}
    for each in scoring_requests():
        found |= run(MODEL, [each], Setup()).prompt_logprobs
    return found


@pytest.mark.parametrize("max_step_tokens", [16, 47, 512])
def test_bits_do_not_depend_on_the_batch(
    alone: dict[str, PromptLogprobs], max_step_tokens: int
) -> None:
    """The log probabilities have the same bits in any batch and in chunks of any size."""
    setup = Setup(speculation_policy("fixed:3"), max_step_tokens=max_step_tokens)
    pairs = zip(generating_requests(7, max_tokens=40), scoring_requests(), strict=True)
    mixed = [each for pair in pairs for each in pair]
    assert run(MODEL, mixed, setup).prompt_logprobs == alone


def test_bits_do_not_depend_on_the_prefix_cache(alone: dict[str, PromptLogprobs]) -> None:
    """The log probabilities of a cached text have the same bits, whoever computed its blocks."""
    engine = Engine(MODEL, Setup())
    engine.run([request("warm", TEXTS[-1], Off(), max_tokens=2)])
    for _ in range(2):
        outcome = engine.run([scoring_requests()[-1]])
        assert outcome.prompt_logprobs["s6"] == alone["s6"]
        assert outcome.cached_tokens == 0
    after = engine.run([request("after", TEXTS[-1], Off(), max_tokens=2)])
    assert after.cached_tokens == 288


def test_bits_survive_a_preemption(alone: dict[str, PromptLogprobs]) -> None:
    """A preempted prompt continues where its log probabilities end, with the same bits."""
    setup = Setup(max_step_tokens=24, num_blocks=30)
    outcome = run(MODEL, [*generating_requests(4, max_tokens=120), *scoring_requests()], setup)
    assert outcome.preemptions > 0
    assert outcome.leaked_blocks == 0
    assert outcome.prompt_logprobs == alone


def test_output_is_the_same_with_log_probabilities_of_the_prompt() -> None:
    """Requests with and without log probabilities of the prompt generate the same tokens."""
    outcomes = [
        run(MODEL, scoring_requests(max_tokens=20, prompt_logprobs=wanted), Setup())
        for wanted in (None, ALTERNATIVES)
    ]
    assert outcomes[0].tokens == outcomes[1].tokens
    assert not outcomes[0].prompt_logprobs
    silent = run(MODEL, scoring_requests(), Setup())
    assert not any(silent.tokens.values())
    assert set(silent.finish_reasons.values()) == {FinishReason.LENGTH}


def test_prompt_has_the_bits_of_the_same_tokens_as_output() -> None:
    """Tokens have the same log probabilities as a prompt and as an output, bit for bit."""
    sampling = {"logprobs": ALTERNATIVES, "temperature": 0.9, "seed": 4}
    outcome = run(MODEL, [request("g", TEXTS[4], Off(), max_tokens=60, **sampling)], Setup())
    text = [*TEXTS[4], *outcome.tokens["g", 0]]
    wanted = request("s", text, Off(), max_tokens=0, prompt_logprobs=ALTERNATIVES)
    scored = list(run(MODEL, [wanted], Setup()).prompt_logprobs["s"].scored_tokens())[-60:]
    generated = outcome.logprobs["g", 0]
    assert [token.logprob for token in scored] == [entry.logprob for entry in generated]
    assert [token.top for token in scored] == [entry.top for entry in generated]


def test_logits_of_a_chunk_are_computed_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """No more than `SCORED_ROWS` rows of logits are in memory, for a chunk of any size."""
    engine, rows = Engine(MODEL, Setup(max_step_tokens=1024)), []
    decoder, logits = engine.runner._decoder, engine.runner._decoder.logits

    def counted(hidden: torch.Tensor) -> torch.Tensor:
        rows.append(len(hidden))
        return logits(hidden)

    monkeypatch.setattr(decoder, "logits", counted)
    text = TEXTS[-1] * 3
    engine.run([request("s", text, Off(), max_tokens=0, prompt_logprobs=1)])
    assert max(rows) == SCORED_ROWS
    assert sum(rows) >= len(text) - 1


def check_against_transformers(
    directory: Path, tokens: list[int], found: PromptLogprobs, alternatives: int
) -> None:
    """Compare log probabilities, ranks and alternatives with those of transformers in float32."""
    from transformers import AutoModelForCausalLM

    oracle = AutoModelForCausalLM.from_pretrained(
        directory, attn_implementation="eager", dtype=torch.float32
    ).eval()
    with torch.no_grad():
        expected = torch.log_softmax(oracle(torch.tensor([tokens])).logits[0].double(), dim=-1)
    scored = list(found.scored_tokens())
    assert len(scored) == len(tokens) - 1
    for row, token, (logprob, rank, top) in zip(expected[:-1], tokens[1:], scored, strict=True):
        assert abs(logprob - row[token].item()) < 1e-4
        # Rounding may swap tokens that are closer to each other than the tolerance.
        assert (row > row[token] + 1e-4).sum() < rank <= (row > row[token] - 1e-4).sum()
        assert len(top) == alternatives
        likeliest = row.topk(alternatives).values.tolist() if alternatives else []
        assert [value for _, value in top] == pytest.approx(likeliest, abs=1e-4)
        assert all(abs(value - row[token].item()) < 1e-4 for token, value in top)


@pytest.mark.parametrize("index", range(len(TEXTS)))
def test_shipped_model_equals_transformers(index: int, alone: dict[str, PromptLogprobs]) -> None:
    """Log probabilities of texts of any length are within 1e-4 of transformers in float32."""
    check_against_transformers(SHIPPED_MODEL, TEXTS[index], alone[f"s{index}"], ALTERNATIVES)


@pytest.mark.parametrize(
    "variant", ["gemma2", "llama-yarn", "mistral-windows", "mixtral", "qwen2", "qwen3-tied"]
)
def test_random_models_equal_transformers(variant: str, tmp_path: Path) -> None:
    """Log probabilities in chunks are within 1e-4 of transformers in float32."""
    random_model(variant).save_pretrained(tmp_path)
    tokens = [RNG.randrange(300) for _ in range(150)]
    wanted = request("s", tokens, Off(), max_tokens=0, prompt_logprobs=0)
    outcome = run(RandomModel(tmp_path), [wanted], Setup(max_step_tokens=33))
    check_against_transformers(tmp_path, tokens, outcome.prompt_logprobs["s"], 0)
