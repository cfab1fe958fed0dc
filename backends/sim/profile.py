"""Step costs of a device, from a `profile/1` file (contract)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Final

import msgspec

from draftgate.policies.costs.step_cost import StepCost

PROFILES: Final = Path(__file__).parent / "profiles"

DEFAULT_KV_TOKEN_BYTES: Final = 16384
"""KV bytes per token where a profile does not say: a model of some 100M parameters in bf16."""

DEFAULT_KV_BYTES: Final = 1 << 30
"""Memory of the KV cache where a profile does not say: there is nothing to measure."""

_Seconds = Annotated[float, msgspec.Meta(ge=0)]
_Count = Annotated[int, msgspec.Meta(ge=1)]


class _DraftFile(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """What drafting costs, in the form of a file; the meaning is in `DraftCost`."""

    sequences: tuple[_Count, ...] = (1,)
    depth_s: tuple[_Seconds, ...] = (0.0,)
    call_s: _Seconds = 0.0


class _ProfileFile(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """The form of a file; the meaning of each field is in `Profile` and `StepCost`."""

    device: str
    model: str
    dtype: str
    source: Annotated[str, msgspec.Meta(min_length=1)]
    token_buckets: tuple[_Count, ...]
    step_s: tuple[_Seconds, ...]
    kv_token_s: _Seconds
    sequence_s: _Seconds
    prefill_attention_s: _Seconds
    draft: dict[str, _DraftFile] = {}
    kv_token_bytes: _Count = DEFAULT_KV_TOKEN_BYTES
    kv_bytes: _Count = DEFAULT_KV_BYTES


@dataclass(frozen=True, slots=True)
class DraftCost:
    """What drafting costs with one proposer.

    Attributes:
        depths: seconds of drafting one token deeper; its tokens are sequences. 0 for look-ups.
        call_s: seconds of each step in which it drafts, at any depth: what a look-up takes.
    """

    depths: StepCost = field(default_factory=lambda: StepCost((1,), (0.0,)))
    call_s: float = 0.0

    def depth_s(self, sequences: int) -> float:
        """Return the seconds of drafting one token deeper for that many sequences."""
        return self.depths.seconds(sequences)


@dataclass(frozen=True, slots=True)
class Profile:
    """What a device needs for a step with a model.

    Attributes:
        name: the shipped name, or the file's name without its ending.
        source: where the figures come from.
        cost: seconds of a step from its tokens, KV tokens, sequences and pairs. The file's
            `prefill_attention_s` is its `pair_s`.
        draft: what drafting costs, by proposer.
        kv_token_bytes: KV memory of one token.
        kv_bytes: memory the device has for the KV cache.
    """

    name: str
    source: str
    cost: StepCost
    draft: Mapping[str, DraftCost] = field(default_factory=dict)
    kv_token_bytes: int = DEFAULT_KV_TOKEN_BYTES
    kv_bytes: int = DEFAULT_KV_BYTES


def profile_names() -> tuple[str, ...]:
    """Return the names of the shipped profiles."""
    return tuple(sorted(path.stem for path in PROFILES.glob("*.json")))


def load_profile(name_or_file: str) -> Profile:
    """Read a shipped profile by name, or a file by its path.

    Raises:
        ValueError: no such profile, or it does not have the form of `profile/1`. The message
            says which file, and what is wrong with it.
    """
    path = _path(name_or_file)
    try:
        content = path.read_bytes()
        read = msgspec.json.decode(content, type=_ProfileFile)
        cost = StepCost(
            read.token_buckets,
            read.step_s,
            read.kv_token_s,
            read.sequence_s,
            read.prefill_attention_s,
        )
        draft = {
            name: DraftCost(StepCost(told.sequences, told.depth_s), told.call_s)
            for name, told in read.draft.items()
        }
    except OSError as error:
        raise ValueError(f"cannot read profile {path}: {error.strerror}") from error
    except (ValueError, msgspec.MsgspecError) as error:
        raise ValueError(f"damaged profile {path}: {error}") from error
    return Profile(path.stem, read.source, cost, draft, read.kv_token_bytes, read.kv_bytes)


def slowed(profile: Profile, times: float) -> Profile:
    """Return the profile of a device that takes so many times as long for everything."""
    if times == 1.0:
        return profile
    draft = {
        name: DraftCost(_slower(cost.depths, times), cost.call_s * times)
        for name, cost in profile.draft.items()
    }
    name = f"{profile.name} x {times:g}"
    return replace(profile, name=name, cost=_slower(profile.cost, times), draft=draft)


def _slower(cost: StepCost, times: float) -> StepCost:
    return replace(
        cost,
        step_s=tuple(seconds * times for seconds in cost.step_s),
        kv_token_s=cost.kv_token_s * times,
        sequence_s=cost.sequence_s * times,
        pair_s=cost.pair_s * times,
    )


def _path(name_or_file: str) -> Path:
    if name_or_file in profile_names():
        return PROFILES / f"{name_or_file}.json"
    path = Path(name_or_file)
    if not path.is_file():
        known = ", ".join(profile_names())
        raise ValueError(
            f"no profile {name_or_file!r}: it is no file, and the shipped ones are {known}"
        )
    return path
