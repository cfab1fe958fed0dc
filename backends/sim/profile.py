"""Step costs of a device, from a `profile/1` file (contract)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec

from policies.step_cost import StepCost

PROFILES: Final = Path(__file__).parent / "profiles"

DEFAULT_KV_TOKEN_BYTES: Final = 16384
"""KV bytes per token where a profile does not say: a model of some 100M parameters in bf16."""

_Seconds = Annotated[float, msgspec.Meta(ge=0)]
_Count = Annotated[int, msgspec.Meta(ge=1)]


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
    draft: dict[str, Any] = {}
    kv_token_bytes: _Count = DEFAULT_KV_TOKEN_BYTES


@dataclass(frozen=True, slots=True)
class Profile:
    """What a device needs for a step with a model.

    Attributes:
        name: the shipped name, or the file's name without its ending.
        source: where the figures come from.
        cost: seconds of a step from its tokens, KV tokens and sequences.
        prefill_attention_s: seconds per pair of a fed token and a KV token it attends to, of work
            that feeds several confirmed tokens.
        kv_token_bytes: KV memory of one token.
    """

    name: str
    source: str
    cost: StepCost
    prefill_attention_s: float = 0.0
    kv_token_bytes: int = DEFAULT_KV_TOKEN_BYTES


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
        cost = StepCost(read.token_buckets, read.step_s, read.kv_token_s, read.sequence_s)
    except OSError as error:
        raise ValueError(f"cannot read profile {path}: {error.strerror}") from error
    except (ValueError, msgspec.MsgspecError) as error:
        raise ValueError(f"damaged profile {path}: {error}") from error
    return Profile(path.stem, read.source, cost, read.prefill_attention_s, read.kv_token_bytes)


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
