"""How the constants of the gateway's forecast were chosen, on recorded drafts.

    python -m bench.engine.request_forecast --json bench/results/request-forecast.json

* `repetition`: what the repetition of a prompt tells of its n-gram drafts, by the tokens that must
  match and the tail that is looked at: slope of a logistic regression, and nats a token it gains.
* `history`: log loss of forecasts of a request's drafts from others of its task, by what all
  requests weigh beside them.
* `caps`: the share of what slots bring over the price that caps leave out, by how much likelier a
  good draft's tokens are taken to be, in logits.

Drafts are those of `bench.engine.proposers` and of the simulator's recording, whose texts
are cut where they begin to loop. Counts, not times, but for what `repetition` takes.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from bench.engine.acceptance import DIGITS
from bench.engine.proposers import tasks
from bench.engine.record import provenance
from bench.engine.survival import Recorded, read_drafts
from draftgate.backends.shipped import SHIPPED_MODEL
from draftgate.backends.tokenizer import Tokenizer
from draftgate.policies.repetition import repetition
from draftgate.policies.request_forecast import GOOD_DRAFT, RequestForecast
from draftgate.policies.speculation import MAX_DRAFT_TOKENS
from draftgate.policies.survival import Acceptance, RequestRecord, Survivals

RECORDING: Final = Path("backends/sim/recordings/shipped.json")
MATCHES: Final = (1, 2, 3, 4)
TAILS: Final = (256, 512, 1024, 2048, 4096)
WEIGHTS: Final = (4, 16, 64, 256, 1024)
SHIFTS: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 2.5)
PRICES: Final = (0.03, 0.1, 0.2, 0.3, 0.5, 0.7)
ORDERS: Final = 20
"""Orders in which requests come, over which log losses are averaged."""


class Text(NamedTuple):
    """One request: its prompt's place and its temperature."""

    task: str
    temperature: float
    prompt: int


Tally = dict[Text, tuple[int, int]]
"""Agreed and rejected draft tokens of each request."""

Prompts = dict[str, list[tuple[int, ...]]]


def tally(drafts: Sequence[Recorded]) -> Tally:
    """Return what became of the draft tokens of each request."""
    found: dict[Text, list[int]] = defaultdict(lambda: [0, 0])
    for draft in drafts:
        counts = found[Text(draft.task, draft.temperature, draft.prompt)]
        counts[0] += draft.agreed
        counts[1] += draft.rejected
    return {text: (agreed, rejected) for text, (agreed, rejected) in found.items()}


def share_right(tokens: Sequence[int], match: int) -> float:
    """Return the share of look-ups within tokens that were right; as `repetition` defines it."""
    latest: dict[tuple[int, ...], int] = {}
    right = found = 0
    for end in range(match, len(tokens)):
        key = tuple(tokens[end - match : end])
        if key in latest:
            found += 1
            right += tokens[latest[key]] == tokens[end]
        latest[key] = end
    return right / found if found else 0.0


def fit(shares: Sequence[float], counts: Sequence[tuple[int, int]]) -> dict[str, float]:
    """Return slope and gain of a logistic regression of acceptance on shares (Newton's method)."""
    features = np.column_stack((np.ones(len(shares)), shares))
    agreed, rejected = np.array(counts, dtype=np.float64).T
    tested, at = agreed + rejected, np.zeros(2)
    for _ in range(50):
        chances = 1.0 / (1.0 + np.exp(-features @ at))
        weights = tested * chances * (1.0 - chances)
        hessian = features.T @ (features * weights[:, None]) + 1e-6 * np.eye(2)
        at += np.linalg.solve(hessian, features.T @ (agreed - tested * chances))
    chances = 1.0 / (1.0 + np.exp(-features @ at))
    mean = agreed.sum() / tested.sum()
    nats = agreed @ np.log(chances / mean) + rejected @ np.log((1.0 - chances) / (1.0 - mean))
    return {
        "slope": round(float(at[1]), 2),
        "gain_nats": round(float(nats / tested.sum()), 4),
        "mean_share": round(float(np.mean(shares)), 3),
        "acceptance": round(float(mean), 3),
    }


def repetition_rows(found: Tally, prompts: Prompts, drafts: str) -> Iterator[dict[str, Any]]:
    """Yield what repetition tells, by temperature, match and tail."""
    for temperature in sorted({text.temperature for text in found}):
        texts = [t for t, n in found.items() if t.temperature == temperature and any(n)]
        for match in MATCHES:
            for tail in TAILS:
                shares = [share_right(prompts[t.task][t.prompt][-tail:], match) for t in texts]
                told = fit(shares, [found[text] for text in texts])
                where = {"drafts": drafts, "temperature": temperature}
                yield {**where, "match_tokens": match, "tail_tokens": tail, **told}


def history_loss(found: Tally, weight: float) -> float:
    """Return the nats a token of forecasts by task and temperature, learned request by request."""
    losses = []
    for order in range(ORDERS):
        texts = sorted(found)
        random.Random(order).shuffle(texts)
        own: dict[tuple[str, float], Acceptance] = defaultdict(Acceptance)
        everybody, nats, tested = Acceptance(), 0.0, 0
        for text in texts:
            agreed, rejected = found[text]
            mine = own[text.task, text.temperature]
            chance = mine.rate(everybody.rate(), weight)
            nats -= agreed * math.log(chance) + rejected * math.log1p(-chance)
            tested += agreed + rejected
            for record in (mine, everybody):
                record.agreed += agreed
                record.rejected += rejected
        losses.append(nats / tested)
    return sum(losses) / len(losses)


def recorded_steps(proposer: str) -> list[Recorded]:
    """Return the drafts of the simulator's recording that a generation would have met."""
    steps = []
    for text in json.loads(RECORDING.read_bytes())["texts"]:
        place = proposer, text["task"], text["temperature"], text["prompt"]
        columns = text["drafts"][proposer]
        proposed = [DIGITS.index(digit) for digit in columns["proposed"]]
        agreed = [DIGITS.index(digit) for digit in columns["agreed"]]
        position = 0
        while position < len(proposed):
            length, right = proposed[position], agreed[position]
            if length:
                evidence = columns["evidence"][position]
                steps.append(Recorded(*place, evidence, length, right, right < length))
            position += right + 1
    return steps


def known_survivals(steps: Sequence[Recorded]) -> list[tuple[Text, tuple[float, ...]]]:
    """Return what a worker that has learned these drafts expects of each draft's slots."""
    survivals = Survivals()
    for learned in (False, True):
        records: dict[Text, RequestRecord] = defaultdict(RequestRecord)
        found = []
        for step in steps:
            text = Text(step.task, step.temperature, step.prompt)
            record = records[text]
            if learned:
                row = survivals.of_found(record, step.evidence)
                found.append((text, row.of_length(step.proposed)))
            survivals.learn(record, step.evidence, step.agreed, rejected=step.rejected)
    return found


def caps_rows(steps: Sequence[Recorded], prompts: Prompts, looks_up: bool) -> list[dict[str, Any]]:
    """Return what caps leave out, by shift and price; the gateway knows temperatures only."""
    rates: dict[float, Acceptance] = defaultdict(Acceptance)
    for step in steps:
        rates[step.temperature].observe(step.agreed, rejected=step.rejected)
    known = known_survivals(steps)
    shares = {t: repetition(prompts[t.task][t.prompt]) if looks_up else None for t, _ in known}
    rows = []
    for shift in SHIFTS:
        chances = {t: _shifted(rate.rate(), shift - GOOD_DRAFT) for t, rate in rates.items()}
        expected = {
            text: RequestForecast(chances[text.temperature], "", share, 1.0)
            for text, share in shares.items()
        }
        for price in PRICES:
            caps = {
                text: max(1, one.paying_slots(price, MAX_DRAFT_TOKENS))
                for text, one in expected.items()
            }
            rows.append(
                {
                    "proposer": steps[0].proposer,
                    "good_draft": shift,
                    "price": price,
                    "lost": round(_lost(known, caps, price), 4),
                    "lost_at_half_the_price": round(_lost(known, caps, price / 2), 4),
                    "caps": [min(caps.values()), max(caps.values())],
                }
            )
    return rows


def _lost(
    known: Sequence[tuple[Text, tuple[float, ...]]], caps: dict[Text, int], price: float
) -> float:
    """Return the share of what slots bring over a price that lies behind caps."""
    lost = total = 0.0
    for text, survivals in known:
        gains = [max(survival - price, 0.0) for survival in survivals]
        total += sum(gains)
        lost += sum(gains[caps[text] :])
    return lost / total if total else 0.0


def _shifted(chance: float, logits: float) -> float:
    return 1.0 / (1.0 + (1.0 - chance) / chance * math.exp(-logits))


def microseconds(run: Callable[[], object], times: int = 200) -> float:
    """Return the least time of a call."""
    best_s = math.inf
    for _ in range(times):
        began_s = time.perf_counter()
        run()
        best_s = min(best_s, time.perf_counter() - began_s)
    return round(best_s * 1e6, 1)


def main() -> None:
    """Measure, print and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True)
    path = parser.parse_args().json
    prompts = tasks(Tokenizer(SHIPPED_MODEL))
    drafts = [*read_drafts("train"), *read_drafts("held-out")]
    ngram = [draft for draft in drafts if draft.proposer == "ngram"]
    steps = {name: recorded_steps(name) for name in ("ngram", "draft_model")}
    long_prompt = tuple(random.Random(0).choices(range(128_000), k=100_000))
    results = {
        "repetition": [
            *repetition_rows(tally(ngram), prompts, "whole texts"),
            *repetition_rows(tally(steps["ngram"]), prompts, "cut where they begin to loop"),
        ],
        "history": [
            {"weight_tokens": weight, "nats": round(history_loss(tally(ngram), weight), 4)}
            for weight in WEIGHTS
        ],
        "caps": [row for name in steps for row in caps_rows(steps[name], prompts, name == "ngram")],
    }
    for name, rows in results.items():
        for row in rows:
            print(name, *(f"{key} {value}" for key, value in row.items()))
    cost_us = microseconds(lambda: repetition(long_prompt))
    print("repetition of 100k tokens:", cost_us, "us")
    told = {**provenance(), "results": results, "repetition_of_100k_tokens_us": cost_us}
    path.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
