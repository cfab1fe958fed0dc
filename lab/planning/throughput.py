"""The throughput of a machine that serves requests of one size within latency targets.

In a steady state, x requests enter and leave in each step of T seconds. With `a` accepted and `k`
draft tokens per step of a sequence, a request of i prompt and o output tokens decodes for
D = (o - 1) / (1 + a) steps (its prompt gives the first token), so by Little's law

    batch      = x D
    T          = cost(batch x (1 + k) + x i tokens, batch x (i + o / 2) KV tokens, batch)
    throughput = x / T

A larger x shares the weights' reads among more tokens, and is limited by

    TPOT    T <= target x (tokens per step of a request with few accepted drafts)
    memory  batch x (i + o) KV tokens
    TTFT    the prompt's computation in the chunks that TPOT leaves, and the mean wait for earlier
            prompts in an M/D/1 queue, as in DistServe (arXiv 2401.09670)

Arrivals vary, so a machine at this rate does not always meet the targets. The capacity for that is
the factor of `load_mix`, because machines share their bursts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from draftgate.lab.planning.queueing import mean_ttft_s
from draftgate.policies.costs.step_cost import StepCost
from draftgate.policies.values import immutable

BISECTIONS: Final = 30
"""Steps of the search for the requests per step, each of which halves the interval."""


@immutable
class Size:
    """Mean lengths of requests, in tokens, at least 1 each."""

    prompt_tokens: float
    output_tokens: float


@immutable
class Targets:
    """Latency targets.

    Attributes:
        ttft_s, tpot_s: limits, infinite without a target.
        share: share of the requests that must meet both, less than 1.
    """

    ttft_s: float = math.inf
    tpot_s: float = math.inf
    share: float = 0.95

    def __str__(self) -> str:
        """Return, for example, `a TTFT of 500 ms and a TPOT of 50 ms for 95% of the requests`."""
        named = (("TTFT", self.ttft_s), ("TPOT", self.tpot_s))
        limits = [f"a {name} of {1e3 * value:g} ms" for name, value in named if value < math.inf]
        return f"{' and '.join(limits) or 'no target'} for {100.0 * self.share:g}% of the requests"


@immutable
class DraftPoint:
    """A way to draft, as means over the steps of sequences.

    Attributes:
        slots: draft tokens per step of a sequence.
        accepted: accepted tokens per step of a sequence.
        least_tokens: tokens per step of a request whose drafts are accepted less often than those
            of the share that must meet the targets. At least 1.
        depth: draft tokens of the longest draft, which determines the time of drafting.
    """

    slots: float = 0.0
    accepted: float = 0.0
    least_tokens: float = 1.0
    depth: int = 0


NO_DRAFTS: Final = DraftPoint()


@immutable
class Machine:
    """The costs and the capacity of a machine.

    Attributes:
        kv_tokens: tokens that its KV cache holds.
        max_sequences, step_tokens: limits of a step.
        depths: seconds of drafting a token deeper, by the number of sequences.
        draft_call_s, draft_sequence_s: further seconds of drafting, per step and per sequence.
        host_s, host_sequence_s: seconds of the host, per step and per sequence.
        host_overlaps: whether the host works while the device computes the previous step.
    """

    cost: StepCost
    kv_tokens: int
    max_sequences: int
    step_tokens: int
    depths: StepCost
    draft_call_s: float = 0.0
    draft_sequence_s: float = 0.0
    host_s: float = 0.0
    host_sequence_s: float = 0.0
    host_overlaps: bool = False


@immutable
class Throughput:
    """The largest rate of requests that a machine serves within the targets.

    Attributes:
        rate_rps: 0 if the machine cannot meet the targets.
        drafts: the way to draft with which it serves this rate.
    """

    rate_rps: float
    drafts: DraftPoint = NO_DRAFTS


def throughput(
    machine: Machine, size: Size, targets: Targets, drafts: Sequence[DraftPoint] = ()
) -> Throughput:
    """Return the throughput with the best way to draft, or without drafts if none is better."""
    best = Throughput(0.0)
    for point in (NO_DRAFTS, *drafts):
        rate_rps = _SteadyState(machine, size, targets, point).most_rps()
        if rate_rps > best.rate_rps:
            best = Throughput(rate_rps, point)
    return best


class _SteadyState:
    """A machine that serves x requests per step."""

    def __init__(self, machine: Machine, size: Size, targets: Targets, drafts: DraftPoint) -> None:
        self._machine, self._size, self._targets, self._drafts = machine, size, targets, drafts
        self._decode_steps = max(size.output_tokens - 1.0, 0.0) / (1.0 + drafts.accepted)
        self._limit_s = targets.tpot_s * drafts.least_tokens if self._decode_steps else math.inf
        tokens = size.prompt_tokens + size.output_tokens
        self._fits = tokens <= machine.kv_tokens
        most = [machine.step_tokens / size.prompt_tokens]
        if self._decode_steps:
            most += [
                machine.max_sequences / self._decode_steps,
                machine.kv_tokens / tokens / self._decode_steps,
            ]
        self._most = min(most)

    def most_rps(self) -> float:
        """Return the largest throughput within the targets, or 0."""
        if not self._fits:
            return 0.0
        low, high = 0.0, self._most
        if not self._holds(low):
            return 0.0
        for _ in range(BISECTIONS):
            middle = (low + high) / 2
            low, high = (middle, high) if self._holds(middle) else (low, middle)
        return low / self._step_s(low) if low else 0.0

    def _holds(self, requests: float) -> bool:
        """Return whether x requests per step are within the limits. 0 is a request alone."""
        decodes_s, token_s, room = self._decodes(requests)
        chunk = min(room, (self._limit_s - decodes_s) / token_s if token_s else room)
        prompts = requests * self._size.prompt_tokens
        if chunk < 1.0 or prompts >= chunk:
            return False
        return self._ttft_s(decodes_s, token_s, chunk, prompts / chunk) <= self._targets.ttft_s

    def _step_s(self, requests: float) -> float:
        decodes_s, token_s, _ = self._decodes(requests)
        return decodes_s + requests * self._size.prompt_tokens * token_s

    def _decodes(self, requests: float) -> tuple[float, float, float]:
        """Return the seconds of a step's decodes and of a prompt token, and the tokens left."""
        machine, size, drafts = self._machine, self._size, self._drafts
        batch = max(requests * self._decode_steps, 1.0) if self._decode_steps else 0.0
        slots = batch * drafts.slots
        tokens, sequences = math.ceil(batch + slots), math.ceil(batch)
        kv_tokens = round(batch * (size.prompt_tokens + size.output_tokens / 2))
        step_s = machine.cost.seconds(tokens, kv_tokens, sequences, math.ceil(slots))
        if drafts.slots:
            step_s += machine.draft_call_s + batch * machine.draft_sequence_s
            step_s += drafts.depth * machine.depths.seconds(sequences)
        host_s = machine.host_s + machine.host_sequence_s * batch
        step_s = max(step_s, host_s) if machine.host_overlaps else step_s + host_s
        room = machine.step_tokens - tokens
        if room <= 0:
            return step_s, 0.0, 0.0
        full_s = machine.cost.seconds(machine.step_tokens) - machine.cost.seconds(tokens)
        # A prompt token attends to half of its prompt on average.
        token_s = full_s / room + machine.cost.pair_s * size.prompt_tokens / 2
        return step_s, token_s, room

    def _ttft_s(self, decodes_s: float, token_s: float, chunk: float, busy: float) -> float:
        """Return the mean TTFT in seconds.

        Args:
            chunk: prompt tokens that a step can have.
            busy: utilisation of the chunks.
        """
        prompt = self._size.prompt_tokens
        prompt_s = max(prompt / chunk, 1.0) * decodes_s + prompt * token_s
        return decodes_s + mean_ttft_s(busy / prompt_s, prompt_s)
