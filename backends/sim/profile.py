"""Costs of a device and its host, from a `profile/2` file, an older `profile/1`, or derived."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Final, Literal

import msgspec

from draftgate.backends.sim.derived_profiles import GPUS, MODELS, derived_profile
from draftgate.policies.costs.step_cost import StepCost

PROFILES: Final = Path(__file__).parent / "profiles"

DEFAULT_KV_TOKEN_BYTES: Final = 16384
"""Default KV bytes per token, for a model with about 100M parameters in bf16."""

DEFAULT_KV_BYTES: Final = 1 << 30
"""Default memory of the KV cache in bytes, because a file has no device to measure."""

DEFAULT_RECORDING: Final = "draftgate-demo"

_Seconds = Annotated[float, msgspec.Meta(ge=0)]
_Dollars = Annotated[float, msgspec.Meta(ge=0)]
_Watts = Annotated[float, msgspec.Meta(ge=0)]
_Count = Annotated[int, msgspec.Meta(ge=1)]


class _DraftFile(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """The format of a draft cost in the file (`DraftCost`)."""

    sequences: tuple[_Count, ...] = (1,)
    depth_s: tuple[_Seconds, ...] = (0.0,)
    call_s: _Seconds = 0.0
    sequence_s: _Seconds = 0.0


class HostCost(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """Time of the host to plan, launch and account for a step, without drafting.

    Attributes:
        step_s: seconds per step.
        sequence_s: seconds per sequence of a step.
        launches_ahead: whether a step may be launched while the previous step runs, which hides
            this time. Otherwise the device always waits for the host.
    """

    step_s: _Seconds = 0.0
    sequence_s: _Seconds = 0.0
    launches_ahead: bool = False


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

    Raises:
        ValueError: the profile does not exist, the device cannot hold the model, or the file is not
            a valid profile. The message names the file and the error.
    """
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
            f" such as a100x4-70b, of {', '.join(GPUS)} and {', '.join(MODELS)}"
        )
    return _read(path)


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
        read.kv_token_bytes,
        read.kv_bytes,
        read.recording,
        read.price_per_hour_usd,
        read.power_w,
    )
