"""An estimate of the rate of a deployment, which orders simulations.

The bounds (`bounds`) must not be too low, so they are often far too high. An estimate may err in
either direction, because a search only begins with the deployments that it prefers. It treats
decodes as a fluid, as the bounds do, and the prompts of a machine as an M/G/1 queue.

* **Decodes.** A step takes the time of its sequences and of the prompts that arrive during it. By
  Little's law, the number of sequences is the rate times the length of an output in such steps.
* **Prompts.** A prompt waits with the probability that all machines are busy. The tail of the wait
  is exponential, as in heavy traffic (Kingman, On queues in heavy traffic, JRSS B 24, 1962). For
  several machines, the probability is that of Sakasegawa (An approximation formula, Annals of the
  Institute of Statistical Mathematics 29, 1977).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Final

import numpy as np
from numpy.typing import NDArray

from draftgate.lab.planning.deployments import Deployment, Group
from draftgate.lab.planning.throughput import Machine, Targets
from draftgate.policies.types import Role
from draftgate.policies.values import immutable

_PROMPTS: Final = 50
"""Quantiles of the prompt lengths that represent the workload."""

_SPLITS: Final = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Shares of a phase that machines of one phase take, beside machines for both."""

_ROUNDS: Final = 12
"""Halvings of the interval of a rate, and steps towards a fixed point."""


@immutable
class Forecast:
    """Estimates the rates of deployments for a workload.

    Attributes:
        machines: the machine of each profile.
        prompts: typical prompt lengths in tokens.
        output_tokens: mean length of an output.
        context_tokens: mean context of a decode step.
    """

    machines: Mapping[str, Machine]
    targets: Targets
    prompts: NDArray[np.float64]
    output_tokens: float
    context_tokens: float

    @classmethod
    def for_requests(
        cls,
        machines: Mapping[str, Machine],
        targets: Targets,
        requests: Sequence[tuple[int, int]],
        context_tokens: float,
    ) -> Forecast:
        """Return the forecast for requests, of which there is at least one.

        Args:
            requests: tokens of prompt and output of each request.
            context_tokens: mean context of a decode step.
        """
        lengths = np.array(requests, dtype=float)
        places = (np.arange(_PROMPTS) + 0.5) / _PROMPTS
        prompts = np.quantile(lengths[:, 0], places)
        return cls(machines, targets, prompts, float(lengths[:, 1].mean()), context_tokens)

    def rate_rps(self, deployment: Deployment, most_rps: float) -> float:
        """Return the estimated rate of a deployment without drafts, up to a bound."""
        low, high = 0.0, most_rps
        for _ in range(_ROUNDS):
            middle = (low + high) / 2.0
            if self.share(deployment, middle) >= self.targets.share:
                low = middle
            else:
                high = middle
        return low

    def share(self, deployment: Deployment, rate_rps: float) -> float:
        """Return the share of the requests that meet both targets at a rate, with the best split.

        Machines for both phases may give each phase to machines of that phase only.
        """
        by_role = {group.role: group for group in deployment.groups}
        both = by_role.get(Role.ANY)
        splits = [
            _SPLITS if role in by_role and both else (float(role in by_role),)
            for role in (Role.PREFILL, Role.DECODE)
        ]
        return max(self._share(by_role, rate_rps, *split) for split in product(*splits))

    def output_s(self, deployment: Deployment, rate_rps: float) -> float:
        """Return the estimated seconds of a mean output at a rate, at most those of the TPOT.

        Machines get prompts and outputs by their number.
        """
        counts = dict.fromkeys(Role, 0)
        counts |= {group.role: group.count for group in deployment.groups}
        longest_s = 0.0
        for group in deployment.groups:
            if group.role is Role.PREFILL:
                continue
            outputs_rps = rate_rps * group.count / (counts[Role.ANY] + counts[Role.DECODE])
            prompts_rps = 0.0
            if group.role is Role.ANY:
                prompts_rps = rate_rps * group.count / (counts[Role.ANY] + counts[Role.PREFILL])
            step_s = self._step_s(group, prompts_rps, outputs_rps)
            load = prompts_rps / group.count * float(self._prompt_s(group.profile).mean())
            mean_s = self.targets.tpot_s if step_s is None else step_s / (1.0 - load)
            longest_s = max(longest_s, min(mean_s, self.targets.tpot_s))
        return self.output_tokens * longest_s

    def _share(
        self, by_role: Mapping[Role, Group], rate_rps: float, prompts: float, outputs: float
    ) -> float:
        """Return the share if machines of one phase take these shares of prompts and outputs."""
        both, share = by_role.get(Role.ANY), 0.0
        if outputs and self._step_s(by_role[Role.DECODE], 0.0, outputs * rate_rps) is None:
            return 0.0
        if prompts:
            share = prompts * self._met(by_role[Role.PREFILL], prompts * rate_rps, 0.0)
        if both is not None:
            rest_rps = (1.0 - prompts) * rate_rps, (1.0 - outputs) * rate_rps
            if self._step_s(both, *rest_rps) is None:
                return 0.0
            share += (1.0 - prompts) * self._met(both, *rest_rps)
        return share

    def _met(self, group: Group, prompts_rps: float, outputs_rps: float) -> float:
        """Return the share of the prompts of machines that meet the targets."""
        cost = self.machines[group.profile].cost
        step_s = self._step_s(group, prompts_rps, outputs_rps)
        if step_s is None:
            return 0.0
        # A prompt joins a step of decodes, after the rest of the step that runs when it arrives.
        service_s = self._prompt_s(group.profile) + step_s
        mean_s = float(service_s.mean())
        load = prompts_rps * mean_s / group.count
        if load >= 1.0:
            return 0.0
        waits = load ** (math.sqrt(2.0 * (group.count + 1)) - 1.0)
        residual_s = float((service_s**2).mean()) / (2.0 * mean_s * group.count)
        left_s = self.targets.ttft_s - service_s
        if outputs_rps:
            left_s = left_s - (step_s - cost.seconds(1)) / 2.0
        late = waits * np.exp(-np.maximum(left_s, 0.0) * (1.0 - load) / residual_s)
        return float(np.where(left_s >= 0.0, 1.0 - late, 0.0).mean())

    def _prompt_s(self, profile: str) -> NDArray[np.float64]:
        """Return the seconds that each prompt adds to a step."""
        machine = self.machines[profile]
        cost, tokens = machine.cost, machine.step_tokens
        token_s = (cost.seconds(tokens) - cost.seconds(1)) / (tokens - 1) + cost.kv_token_s
        return token_s * self.prompts + cost.pair_s * self.prompts**2 / 2.0

    def _step_s(self, group: Group, prompts_rps: float, outputs_rps: float) -> float | None:
        """Return the seconds of a step without its prompts, or None if it misses the TPOT."""
        machine = self.machines[group.profile]
        prompts_load = prompts_rps / group.count * float(self._prompt_s(group.profile).mean())
        most = min(machine.max_sequences, machine.kv_tokens / self.context_tokens)
        host_s = 0.0 if machine.host_overlaps else machine.host_s
        step_s = machine.cost.seconds(1) + host_s
        if prompts_load >= 1.0:
            return None
        for _ in range(_ROUNDS if outputs_rps else 0):
            mean_s = step_s / (1.0 - prompts_load)
            batch = math.ceil(outputs_rps / group.count * self.output_tokens * mean_s)
            if batch > most or mean_s > self.targets.tpot_s:
                return None
            kv_tokens = round(batch * self.context_tokens)
            step_s = machine.cost.seconds(batch, kv_tokens, batch) + host_s
        return step_s
