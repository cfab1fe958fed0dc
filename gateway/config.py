"""Settings: one struct, from which flags, environment variables and the file follow.

`ServeConfig` is the only definition. A field `max_num_seqs` is the flag `--max-num-seqs`, the
variable `DRAFTGATE_MAX_NUM_SEQS` and the key `max_num_seqs` of the YAML file; its annotation
holds bounds and help. A flag wins over the environment, that over the file, that over the default.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any, Final, get_args, get_type_hints

import msgspec
from msgspec import Meta

from backends.base import WorkerConfig
from backends.registry import backend_names
from policies.registry import batching_policy, speculation_policy

ENV_PREFIX: Final = "DRAFTGATE_"


class ConfigError(ValueError):
    """A setting is unknown or has a bad value; the message is one line and names it."""


def _meta(
    text: str,
    *,
    kind: str = "",
    choices: tuple[str, ...] = (),
    gateway: bool = False,
    gt: float | None = None,
    ge: float | None = None,
    le: float | None = None,
) -> Meta:
    """Describe a setting.

    Args:
        text: the help text.
        kind: what a text stands for: `bytes` takes 512MiB, `indices` takes 0,1; `backend`,
            `speculation` and `batching` are names.
        choices: the values there are, in lower case; empty means any.
        gateway: whether it concerns the server only, not the model: `generate` does without.
        gt: what the value must exceed; instead of `ge`.
        ge: least value.
        le: greatest value.
    """
    extra = {"kind": kind, "choices": choices, "gateway": gateway}
    if gt is not None:
        return Meta(description=text, extra=extra, gt=gt, le=le)
    return Meta(description=text, extra=extra, ge=ge, le=le)


_OF_ONE_WORKER: Final = frozenset({"device_index", "num_workers", "threads"})
"""Fields of a worker's configuration that depend on how many workers there are."""


class ServeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Every setting of a node."""

    model: (
        Annotated[
            str,
            _meta("Checkpoint: a directory, or a name on the Hugging Face hub (default: shipped)"),
        ]
        | None
    ) = None
    host: Annotated[str, _meta("Address to listen on; 0.0.0.0 is all", gateway=True)] = "127.0.0.1"
    port: Annotated[
        int, _meta("Port to listen on; 0 picks a free one", gateway=True, ge=0, le=65535)
    ] = 8000
    backend: Annotated[
        str, _meta("What runs requests: engine, sim, or one installed beside", kind="backend")
    ] = "engine"
    speculation: Annotated[
        str,
        _meta(
            "Speculation policy: auto, off, fixed:K, smartspec, adaptive_verification, ...",
            kind="speculation",
        ),
    ] = "auto"
    batching: Annotated[
        str,
        _meta(
            "Prompt tokens of a step: slack, fixed:TOKENS, prefill_first, decode_first, ...",
            kind="batching",
        ),
    ] = "slack"
    proposer: (
        Annotated[str, _meta("The only proposer to draft with (default: whatever is there)")] | None
    ) = None
    draft_model: (
        Annotated[
            str,
            _meta("Draft model: a directory or hub name (default: the shipped one's own, or none)"),
        ]
        | None
    ) = None
    draft_window_tokens: (
        Annotated[
            int,
            _meta(
                "Tokens back that each layer of the draft model looks (default: the model's)", ge=1
            ),
        ]
        | None
    ) = None
    ngram_corpus_tokens: Annotated[
        int,
        _meta("Tokens of finished requests that n-gram drafts of a tenant may look in", ge=0),
    ] = 0
    sparse_budget_tokens: Annotated[
        int, _meta("Tokens of a sequence that sparse self-speculation reads", ge=16)
    ] = 512
    sparse_sink_tokens: Annotated[int, _meta("Of these, the first ones of the sequence", ge=0)] = 16
    verify: Annotated[
        str,
        _meta(
            "How drafts are verified: coupled ties the text to the seed, rejection accepts more",
            choices=("coupled", "rejection"),
        ),
    ] = "coupled"
    exact: Annotated[
        bool, _meta("Promise the same bits for any batching, also where that costs time")
    ] = False
    dtype: Annotated[
        str,
        _meta(
            "Type of weights and activations",
            choices=("auto", "float32", "bfloat16", "float16"),
        ),
    ] = "auto"
    device: Annotated[
        str, _meta("What the engine computes on", choices=("auto", "cpu", "cuda"))
    ] = "auto"
    devices: Annotated[
        tuple[int, ...],
        _meta("Indices of the devices to use, such as 0,1: one worker each", kind="indices"),
    ] = (0,)
    max_model_len: (
        Annotated[int, _meta("Most tokens of prompt and output (default: the model's)", ge=1)]
        | None
    ) = None
    max_num_seqs: Annotated[int, _meta("Most sequences in a batch", ge=1)] = 64
    max_step_tokens: Annotated[int, _meta("Token budget of a step", ge=1)] = 512
    kv_bytes: (
        Annotated[
            int,
            _meta(
                "Memory of a worker's KV cache, such as 512MiB (default: what is free)",
                kind="bytes",
                ge=1,
            ),
        ]
        | None
    ) = None
    gpu_memory_utilization: Annotated[
        float,
        _meta("Share of a GPU's memory to use where --kv-bytes is not given", gt=0, le=1),
    ] = 0.9
    threads: (
        Annotated[
            int,
            _meta("Threads of each CPU worker (default: its share of the cores, 1 or more)", ge=1),
        ]
        | None
    ) = None
    own_process: Annotated[
        bool, _meta("Run the engine in a process of its own: for many open streams")
    ] = False
    profile: Annotated[str, _meta("Step costs of the simulator: a shipped name or a file")] = (
        "cpu-demo"
    )
    sim_service_ms: (
        Annotated[float, _meta("sim: constant service time of a request", ge=0)] | None
    ) = None
    sim_acceptance: Annotated[
        float, _meta("sim: chance that a draft token is accepted", ge=0, le=1)
    ] = 0.6
    decisions_file: (
        Annotated[str, _meta("Append every decision about speculation to this file, as JSON lines")]
        | None
    ) = None
    served_model_name: (
        Annotated[str, _meta("Name clients use (default: the model's own)", gateway=True)] | None
    ) = None
    drain_timeout_s: Annotated[
        float, _meta("Seconds open streams may take to end on SIGTERM", gateway=True, ge=0)
    ] = 30.0
    max_body_bytes: Annotated[
        int, _meta("Largest request body, such as 8MiB", kind="bytes", gateway=True, ge=1)
    ] = 8 << 20
    log_level: Annotated[
        str,
        _meta("Least severity to log", choices=("debug", "info", "warning", "error"), gateway=True),
    ] = "info"

    def worker_configs(self) -> tuple[WorkerConfig, ...]:
        """Return what concerns the workers: a configuration for each of the devices."""
        shared = {
            field.name: getattr(self, field.name)
            for field in fields(WorkerConfig)
            if field.name not in _OF_ONE_WORKER
        }
        return tuple(
            WorkerConfig(
                **shared,
                device_index=device,
                num_workers=len(self.devices),
                threads=self._threads(),
            )
            for device in self.devices
        )

    def _threads(self) -> int | None:
        """Return the threads of a worker: those asked for, or its share of the cores."""
        if self.threads is not None or len(self.devices) == 1:
            return self.threads
        return max(1, _usable_cores() // len(self.devices))


def _usable_cores() -> int:
    """Return how many cores this process may run on, where the system tells."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@dataclass(frozen=True, slots=True)
class Setting:
    """One field of `ServeConfig`, as flags, environment and file see it."""

    name: str
    annotation: Any
    default: Any
    help: str
    kind: str
    choices: tuple[str, ...]
    gateway: bool

    @property
    def flag(self) -> str:
        """The command line's name for it."""
        return "MODEL" if self.name == "model" else "--" + self.name.replace("_", "-")

    @property
    def numeric(self) -> bool:
        """Whether it is a number."""
        return _annotated(self.annotation).__origin__ in (int, float)

    @property
    def boolean(self) -> bool:
        """Whether it is on or off."""
        return _annotated(self.annotation).__origin__ is bool

    @property
    def variable(self) -> str:
        """The environment's name for it."""
        return ENV_PREFIX + self.name.upper()

    def shown(self, value: object) -> str:
        """Return a value as a flag would have it; `-` for none."""
        if isinstance(value, tuple):
            return ",".join(map(str, value))
        return "-" if value is None else str(value)

    def read(self, value: object, source: str) -> Any:
        """Return the value checked and converted.

        Raises:
            ConfigError: it does not fit; the message begins with `source`.
        """
        try:
            if isinstance(value, str) and self.kind == "bytes":
                value = _bytes(value)
            if self.kind == "indices":
                value = _indices(value)
            if value is False and self.kind == "speculation":
                value = "off"  # which is how YAML spells false
            if isinstance(value, str) and self.choices:
                value = value.lower()
            checked = msgspec.convert(value, self.annotation, strict=False)
            self._check(checked)
        except ValueError as error:
            reason = str(error).partition(", got ")[0].replace("`", "")
            reason = reason[:1].lower() + reason[1:]
            raise ConfigError(f"{source}: {reason} (given: {value!r})") from None
        return checked

    def _check(self, value: object) -> None:
        choices = self.choices
        if self.kind == "backend":
            choices = backend_names()
        if self.kind == "speculation":
            speculation_policy(str(value))
        if self.kind == "batching":
            batching_policy(str(value))
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError("expected a finite number")
        if choices and value not in choices:
            raise ValueError(f"expected one of {', '.join(choices)}")


@dataclass(frozen=True, slots=True)
class EffectiveConfig:
    """The settings in force, and where each one comes from."""

    config: ServeConfig
    origins: Mapping[str, str]


def settings() -> tuple[Setting, ...]:
    """Return every setting, in the order of the struct."""
    hints = get_type_hints(ServeConfig, include_extras=True)
    found = []
    for field in msgspec.structs.fields(ServeConfig):
        annotation = hints[field.name]
        meta: Meta = _annotated(annotation).__metadata__[0]
        extra = meta.extra or {}
        found.append(
            Setting(
                field.name,
                annotation,
                field.default,
                meta.description or "",
                str(extra["kind"]),
                tuple(extra["choices"]),
                bool(extra["gateway"]),
            )
        )
    return tuple(found)


def _annotated(annotation: Any) -> Any:
    """Return `Annotated[T, meta]` of itself, or of `Annotated[T, meta] | None`."""
    return annotation if hasattr(annotation, "__metadata__") else get_args(annotation)[0]


def effective_config(
    flags: Mapping[str, object], environ: Mapping[str, str], file: str | None = None
) -> EffectiveConfig:
    """Merge flags, environment, file and defaults.

    Args:
        flags: values by field name; None means the flag was not given.
        environ: the environment.
        file: the YAML file; None looks at `DRAFTGATE_CONFIG`.

    Raises:
        ConfigError: a key is unknown, or a value bad.
    """
    path = file or environ.get(ENV_PREFIX + "CONFIG")
    from_file = _read_file(Path(path)) if path else {}
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for setting in settings():
        raw, origin = setting.default, "default"
        if flags.get(setting.name) is not None:
            raw, origin = flags[setting.name], setting.flag
        elif setting.variable in environ:
            raw, origin = environ[setting.variable], setting.variable
        elif setting.name in from_file:
            raw, origin = from_file[setting.name], f"{path}: {setting.name}"
        values[setting.name] = raw if origin == "default" else setting.read(raw, origin)
        origins[setting.name] = origin
    return EffectiveConfig(ServeConfig(**values), origins)


def load_config(flags: Mapping[str, object], file: str | None = None) -> EffectiveConfig:
    """Return `effective_config` of this process's environment."""
    return effective_config(flags, os.environ, file)


def _read_file(path: Path) -> dict[str, object]:
    import yaml

    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"{path}: not YAML: {reason}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: a mapping of settings was expected")
    known = {setting.name for setting in settings()}
    found = {str(key).replace("-", "_"): value for key, value in content.items()}
    for key in found:
        if key not in known:
            raise ConfigError(f"{path}: unknown key {key!r}; known: {', '.join(sorted(known))}")
    return found


def _indices(value: object) -> list[int]:
    """Read different indices from 0 on: the text `0,1`, one number, or a list of them.

    Raises:
        ValueError: they are none.
    """
    items = value.split(",") if isinstance(value, str) else value
    try:
        found = [int(str(item)) for item in (items if isinstance(items, list) else [items])]
    except ValueError:
        found = []
    if not found or min(found) < 0 or len(set(found)) < len(found):
        raise ValueError("expected different indices from 0 on, such as 0,1")
    return found


_UNITS: Final = {
    "": 1,
    "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12,
    "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40,
}  # fmt: skip


def _bytes(text: str) -> int:
    """Read a size: `1073741824`, `512MiB`, `1.5 GB`.

    Raises:
        ValueError: it is none.
    """
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([kmgt]?(?:ib)?)b?", text.strip().lower())
    if match is None or match[2] not in _UNITS:
        raise ValueError("expected a size in bytes, such as 512MiB or 1GiB")
    return int(Fraction(match[1]) * _UNITS[match[2]])
