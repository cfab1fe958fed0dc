"""Costs of a device and its host, from a `profile/2` file, an older `profile/1`, or derived."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Final, Literal

import msgspec

from draftgate.backends.sim.derived_profiles import GPUS, MODELS, derived_profile
from draftgate.backends.sim.engine_costs import ENGINES, HostCost
from draftgate.policies.costs.step_cost import StepCost

PROFILES: Final = Path(__file__).parent / "profiles"

DEFAULT_KV_TOKEN_BYTES: Final = 16384
"""Default KV bytes per token, for a model with about 100M parameters in bf16."""

DEFAULT_KV_BYTES: Final = 1 << 30
"""Default memory of the KV cache in bytes, because a file has no device to measure."""

DEFAULT_RECORDING: Final = "draftgate-demo"

_Seconds = Annotated[float, msgspec.Meta(ge=0)]
_BytesPerSecond = Annotated[float, msgspec.Meta(gt=0)]
_Dollars = Annotated[float, msgspec.Meta(ge=0)]
_Watts = Annotated[float, msgspec.Meta(ge=0)]
_Count = Annotated[int, msgspec.Meta(ge=1)]


class _DraftFile(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """The format of a draft cost in the file (`DraftCost`)."""

    sequences: tuple[_Count, ...] = (1,)
    depth_s: tuple[_Seconds, ...] = (0.0,)
    call_s: _Seconds = 0.0
    sequence_s: _Seconds = 0.0


class _ProfileFile(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """The format of a profile in the file (`Profile` and `StepCost`)."""

    device: str
    model: str
    dtype: str
    source: Annotated[str, msgspec.Meta(min_length=1)]
    token_buckets: tuple[_Count, ...]
    step_s: tuple[_Seconds, ...]
    kv_token_s: _Seconds
    sequence_s: _Seconds
    prefill_attention_s: _Seconds
    sample_s: _Seconds = 0.0
    draft: dict[str, _DraftFile] = {}
    kv_token_bytes: _Count = DEFAULT_KV_TOKEN_BYTES
    kv_bytes: _Count = DEFAULT_KV_BYTES
    format: Literal["profile/1", "profile/2"] = "profile/1"
    host: HostCost = HostCost()
    step_host_s: _Seconds | None = None
    kv_copy_bytes_s: _BytesPerSecond | None = None
    recording: str = DEFAULT_RECORDING
    price_per_hour_usd: _Dollars | None = None
    power_w: _Watts | None = None


@dataclass(frozen=True, slots=True)
class DraftCost:
    """Cost of drafting with one proposer.

    Attributes:
        depths: seconds per drafted token, by the number of sequences, or 0 for lookups.
        call_s: additional seconds of each step with drafts.
        sequence_s: additional seconds per sequence, such as the time of a lookup.
    """

    depths: StepCost = field(default_factory=lambda: StepCost((1,), (0.0,)))
    call_s: float = 0.0
    sequence_s: float = 0.0

    def depth_s(self, sequences: int) -> float:
        """Return the seconds to draft one token deeper for `sequences` sequences."""
        return self.depths.seconds(sequences)


@dataclass(frozen=True, slots=True)
class Profile:
    """Costs and memory of a device with a model.

    Attributes:
        name: shipped name, or the file name without its suffix.
        source: origin of the values.
        cost: step costs in seconds. Its `pair_s` is the file's `prefill_attention_s`.
        draft: cost of drafting, by proposer.
        host: cost of planning and accounting.
        step_host_s: seconds of the host that the step times of `cost` include, or None if unknown.
        kv_copy_bytes_s: bytes per second at which the worker's thread copies KV blocks between two
            steps, or infinity if copies take no time of the worker.
        kv_token_bytes: KV memory of one token in bytes.
        kv_bytes: memory of the device's KV cache in bytes.
        recording: texts of the model that a simulation replays, a shipped name or a file.
        price_per_hour_usd: price of the device for an hour, or None if it is unknown.
        power_w: power of the device, or None if it is unknown.
    """

    name: str
    source: str
    cost: StepCost
    draft: Mapping[str, DraftCost] = field(default_factory=dict)
    host: HostCost = field(default_factory=HostCost)
    step_host_s: float | None = None
    kv_copy_bytes_s: float = math.inf
    kv_token_bytes: int = DEFAULT_KV_TOKEN_BYTES
    kv_bytes: int = DEFAULT_KV_BYTES
    recording: str = DEFAULT_RECORDING
    price_per_hour_usd: float | None = None
    power_w: float | None = None


def profile_names() -> tuple[str, ...]:
    """Return the names of the shipped files."""
    return tuple(sorted(path.stem for path in PROFILES.glob("*.json")))


def load_profile(name_or_file: str) -> Profile:
    """Read a shipped profile by name, derive one (`derived_profiles`), or read a file by its path.

    `PROFILE@ENGINE` replaces the host costs of a profile by those of an engine (`engine_costs`).

    Raises:
        ValueError: the profile or the engine does not exist, the device cannot hold the model, or
            the file is not a valid profile. The message names the file and the error.
    """
    base, _, engine = name_or_file.rpartition("@")
    if base and engine in ENGINES:
        return _with_engine(load_profile(base), engine)
    if name_or_file in profile_names():
        return _read(PROFILES / f"{name_or_file}.json")
    derived = derived_profile(name_or_file)
    if derived is not None:
        return _profile(name_or_file, msgspec.convert(derived, _ProfileFile))
    path = Path(name_or_file)
    if not path.is_file():
        known = ", ".join(profile_names())
        raise ValueError(
            f"no profile {name_or_file!r}: expected the path of a file, one of {known}, or a name"
            f" such as a100x4-70b, of {', '.join(GPUS)} and {', '.join(MODELS)}, and after a @ one"
            f" of the engines {', '.join(ENGINES)}"
        )
    return _read(path)


def _with_engine(profile: Profile, engine: str) -> Profile:
    """Return a profile with the host costs of an engine.

    Raises:
        ValueError: it is unknown how much host time the step times of the profile include.
    """
    included_s = profile.step_host_s
    if included_s is None:
        raise ValueError(
            f"the profile {profile.name} does not say how much host time its steps include: add"
            " step_host_s to the file, or omit the engine"
        )
    cost = profile.cost
    steps = tuple(max(step_s - included_s, 0.0) for step_s in cost.step_s)
    return replace(
        profile,
        name=f"{profile.name}@{engine}",
        source=f"{profile.source} {ENGINES[engine].source}.",
        cost=StepCost(
            cost.token_buckets, steps, cost.kv_token_s, cost.sequence_s, cost.pair_s, cost.sample_s
        ),
        host=ENGINES[engine].host,
        step_host_s=0.0,
    )


def _read(path: Path) -> Profile:
    try:
        read = msgspec.json.decode(path.read_bytes(), type=_ProfileFile)
        return _profile(path.stem, read)
    except OSError as error:
        raise ValueError(f"cannot read profile {path}: {error.strerror}") from error
    except (ValueError, OverflowError, msgspec.MsgspecError) as error:
        raise ValueError(f"damaged profile {path}: {error}") from error


def _profile(name: str, read: _ProfileFile) -> Profile:
    cost = StepCost(
        read.token_buckets,
        read.step_s,
        read.kv_token_s,
        read.sequence_s,
        read.prefill_attention_s,
        read.sample_s,
    )
    draft = {
        name: DraftCost(StepCost(one.sequences, one.depth_s), one.call_s, one.sequence_s)
        for name, one in read.draft.items()
    }
    return Profile(
        name,
        read.source,
        cost,
        draft,
        read.host,
        read.step_host_s,
        math.inf if read.kv_copy_bytes_s is None else read.kv_copy_bytes_s,
        read.kv_token_bytes,
        read.kv_bytes,
        read.recording,
        read.price_per_hour_usd,
        read.power_w,
    )
