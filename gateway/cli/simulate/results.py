"""Results as JSON: `summary/1` for each policy, intervals, differences, and what was simulated.

Nothing in it depends on the machine or the hour: the same command gives the same bytes.
"""

from __future__ import annotations

from typing import Any

from msgspec import to_builtins

from draftgate import __version__
from draftgate.backends.sim.profile import load_profile
from draftgate.backends.sim.recording import load_recording
from draftgate.gateway.cli.simulate.experiment import Outcome, Results, Setup
from draftgate.gateway.cli.simulate.intervals import Estimate, differences, estimate, known

MEANS = ("goodput_rps", "attainment", "accepted_tokens_per_s")
DISTRIBUTIONS = ("ttft_s", "tpot_s", "latency_s")


def as_json(setup: Setup, results: Results) -> dict[str, Any]:
    """Return the results."""
    first, *others = results.outcomes
    return {
        "format": "simulation/1",
        "version": __version__,
        "settings": settings_of(setup),
        "profile": load_profile(setup.config.profile).source,
        "acceptance": load_recording().source,
        "policies": {outcome.policy: _policy(outcome) for outcome in results.outcomes},
        "differences": {
            outcome.policy: {"to": first.policy, **compared(outcome, first)} for outcome in others
        },
    }


def settings_of(setup: Setup) -> dict[str, Any]:
    """Return all that is needed to repeat the simulation."""
    load = to_builtins(setup.load, enc_hook=str)
    config = setup.config
    return {
        **{name: value for name, value in load.items() if value is not None},
        "workers": setup.workers,
        "routing": setup.routing,
        "profile": config.profile,
        "batching": config.batching,
        "proposer": config.proposer or "ngram",
        "max_num_seqs": config.max_num_seqs,
        "max_step_tokens": config.max_step_tokens,
        "max_model_len": config.max_model_len,
        "kv_bytes": config.kv_bytes,
        "seeds": list(range(setup.load.seed, setup.load.seed + setup.repeat)),
        "belief_error": setup.belief_error,
        "truth": setup.truth,
    }


def compared(outcome: Outcome, to: Outcome) -> dict[str, Any]:
    """Return the differences to another policy's outcome, by figure, on the same requests."""
    found = {}
    for figure, ours in outcome.samples.items():
        theirs = to.samples[figure]
        difference = estimate(differences(ours, theirs))
        base = estimate(known(theirs))
        if difference is not None and base is not None:
            found[figure] = {**difference.as_dict(), "relative": _share(difference, base)}
    return found


def estimates(outcome: Outcome) -> dict[str, Estimate]:
    """Return the means of an outcome's figures with their intervals."""
    found = {figure: estimate(known(values)) for figure, values in outcome.samples.items()}
    return {figure: value for figure, value in found.items() if value is not None}


def _share(difference: Estimate, base: Estimate) -> float | None:
    return difference.mean / base.mean if base.mean else None


def _policy(outcome: Outcome) -> dict[str, Any]:
    intervals = {figure: value.as_dict() for figure, value in estimates(outcome).items()}
    if len(outcome.summaries) == 1:
        return {**outcome.summaries[0], "intervals": intervals}
    return {**mean_summary(outcome.summaries), "intervals": intervals, "runs": outcome.summaries}


def mean_summary(summaries: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the `summary/1` of several seeds: counts added up, figures averaged."""
    errors: dict[str, int] = {}
    for summary in summaries:
        for cause, count in summary["errors"].items():
            errors[cause] = errors.get(cause, 0) + count
    return {
        "requests": sum(summary["requests"] for summary in summaries),
        "valid": all(summary["valid"] for summary in summaries),
        "errors": errors,
        **{name: _mean([summary[name] for summary in summaries]) for name in MEANS},
        **{name: _mean_of([summary[name] for summary in summaries]) for name in DISTRIBUTIONS},
    }


def _mean(values: list[float | None]) -> float | None:
    found = estimate(known(values))
    return None if found is None else found.mean


def _mean_of(distributions: list[dict[str, float] | None]) -> dict[str, float | None] | None:
    found = [each for each in distributions if each is not None]
    return {name: _mean([each[name] for each in found]) for name in found[0]} if found else None
