"""The models of a node, derived from its settings.

The first model is `MODEL`. `--model` and `--embedder` add further models, which have workers on the
same devices. Settings that depend on a model, such as its draft model and its adapters, apply to
`MODEL` alone. The models of all upstreams are one plan, the last one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from msgspec.structs import replace

from draftgate.backends.checkpoints import checkpoint_id, named_checkpoints
from draftgate.backends.generation_defaults import AUTO, NONE
from draftgate.backends.worker_config import WorkerConfig
from draftgate.gateway.config.schema import ServeConfig
from draftgate.gateway.config.values import chains_of

EMBEDDER_SHARE: Final = 0.05
"""Share of the memory budget for an embedder. An encoder has no KV cache. A decoder keeps the KV of
a few texts, which 5% of the smallest budget in use, 512 MiB, holds for a model of 1B parameters.
(Chosen, not tuned, 2026-11-27.)"""


class ModelPlan(NamedTuple):
    """A model that a node loads, or all models of its upstreams.

    Attributes:
        name: the name in the pool, or None for the name of the checkpoint.
        config: the settings of the node for this model.
        memory_share: share of the memory budget of each device.
    """

    name: str | None
    config: ServeConfig
    memory_share: float = 1.0

    def worker_configs(self) -> tuple[WorkerConfig, ...]:
        """Return the configurations of the workers, as `ServeConfig.worker_configs` does."""
        return self.config.worker_configs(self.name, self.memory_share)


def plan_models(config: ServeConfig) -> tuple[ModelPlan, ...]:
    """Return the models of a node, `MODEL` first and those of upstreams last.

    Raises:
        ValueError: the settings contradict each other.
    """
    if not config.upstream or config.only_forwards:
        return _plan_own(config)
    own = _plan_own(replace(config, upstream=(), upstream_speculates=(), fallbacks=()))
    return (*own, ModelPlan(None, _for_upstreams(config)))


def _plan_own(config: ServeConfig) -> tuple[ModelPlan, ...]:
    more = [*named_checkpoints(config.models), *named_checkpoints(config.embedders)]
    first = config.first_name or checkpoint_id(config.model)
    names = [first, *(name for name, _ in more)]
    further = config.served_model_name[1:]
    all_names = [*names, *further, *(name for name, _ in named_checkpoints(config.loras))]
    _check_names(all_names)
    if not (config.only_forwards or config.join):
        _check_fallbacks(config, all_names)
    if not more:
        if config.memory_shares:
            raise ValueError("--memory-share needs --model or --embedder")
        return (ModelPlan(None, config),)
    _check(config)
    embedders = {name for name, _ in named_checkpoints(config.embedders)}
    shares = divide_memory(names, embedders, _shares(config.memory_shares))
    own = ModelPlan(None, config, shares[first])
    return (
        own,
        *(ModelPlan(name, _for_model(config, name, path), shares[name]) for name, path in more),
    )


def divide_memory(
    names: Sequence[str], embedders: set[str], given: Mapping[str, float]
) -> dict[str, float]:
    """Return the share of each model of the memory budget of a device.

    An embedder without a given share gets `EMBEDDER_SHARE`. The other models without one divide the
    rest equally.

    Args:
        given: the shares that the settings give.

    Raises:
        ValueError: a share names another model, is not between 0 and 1, or the rest is too small.
    """
    for name, share in given.items():
        if name not in names:
            raise ValueError(f"--memory-share: {name!r} is none of {', '.join(names)}")
        if not 0.0 < share <= 1.0:
            raise ValueError(f"--memory-share: {name} needs more than 0 and at most 1")
    shares = dict.fromkeys(embedders, EMBEDDER_SHARE) | dict(given)
    rest = [name for name in names if name not in shares]
    left = 1.0 - sum(shares.values())
    if left < -1e-9 or (rest and left <= 1e-9):
        raise ValueError("--memory-share: the shares of all models exceed 1")
    return shares | {name: left / len(rest) for name in rest}


def _check_names(names: Sequence[str]) -> None:
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise ValueError(
            f"two models or adapters have the name {twice[0]!r}: rename one with NAME=CHECKPOINT"
        )


def _check_fallbacks(config: ServeConfig, names: Sequence[str]) -> None:
    """Check that a node without upstreams and pool has the models that may get requests."""
    for model, chain in chains_of(config.fallbacks).items():
        for name in chain:
            if name not in names:
                raise ValueError(
                    f"--fallback {model}={name}: the node has no model {name!r}; it has "
                    f"{', '.join(names)}; add others with --model or --upstream"
                )


def _check(config: ServeConfig) -> None:
    if config.upstream:
        raise ValueError(
            f"--model and --embedder cannot be combined with --backend {config.backend}"
        )
    if config.own_process:
        raise ValueError(
            "--model and --embedder cannot be combined with --own-process, because the models of a "
            "device take turns within one process"
        )


def _shares(entries: Sequence[str]) -> dict[str, float]:
    return {name: float(share) for name, _, share in (each.rpartition("=") for each in entries)}


def _of_every_model(generation_config: str) -> str:
    """Return a value of `--generation-config` for a further model, whose file no path names."""
    return generation_config if generation_config in NONE else AUTO


def _for_upstreams(config: ServeConfig) -> ServeConfig:
    """Return the settings of the upstreams of a node that has its own workers, too."""
    return replace(
        config,
        backend="openai",
        model=None,
        loras=(),
        served_model_name=(),
        record_acceptance=None,
        no_worker=False,
        models=(),
        embedders=(),
        memory_shares=(),
    )


def _for_model(config: ServeConfig, name: str, path: str) -> ServeConfig:
    """Return the settings of a further model."""
    return replace(
        config,
        model=path,
        loras=(),
        served_model_name=(name,),
        max_model_len=None,
        generation_config=_of_every_model(config.generation_config),
        proposer=None,
        draft_model=None,
        draft_window_tokens=None,
        record_acceptance=None,
        models=(),
        embedders=(),
        memory_shares=(),
    )
