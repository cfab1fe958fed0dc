"""What is in force: a flag wins over the environment, that over the file, that over the default."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final, get_args, get_type_hints

import msgspec
from msgspec import Meta

from draftgate.backends.registry import backend_names
from draftgate.gateway.config.schema import ServeConfig
from draftgate.gateway.config.values import (
    MASK,
    check_pool,
    check_url,
    indices,
    masked_url,
    size_bytes,
    texts,
    urls,
)
from draftgate.gateway.state.redis.url import read_redis_url
from draftgate.policies.registry import (
    admission_policy,
    batching_policy,
    ordering_policy,
    routing_policy,
    speculation_policy,
)

ENV_PREFIX: Final = "DRAFTGATE_"

CONFIG_VARIABLE: Final = ENV_PREFIX + "CONFIG"
"""Names the file, as `--config` does."""

_OF_KUBERNETES: Final = re.compile(
    ENV_PREFIX
    + r"([A-Z0-9_]+?_)??(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\d+_(TCP|UDP|SCTP)(_\w+)?)?)"
)
"""What it puts into every pod for a service whose name begins with ours; see `_linked`."""

_POLICIES: Final[Mapping[str, Callable[[str], object]]] = {
    "speculation": speculation_policy,
    "batching": batching_policy,
    "ordering": ordering_policy,
    "admission": admission_policy,
    "routing": routing_policy,
}
"""Kinds of settings that name a policy; each refuses names that it does not know."""

_TEXTS: Final[Mapping[str, Callable[[str], object]]] = {
    "url": check_url,
    "store": read_redis_url,
    "pool": check_pool,
}
"""Kinds of settings that have a form; each refuses what has another."""


class ConfigError(ValueError):
    """A setting is unknown or has a bad value; the message is one line and names it."""


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
    secret: bool = False

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

    def public(self, value: Any) -> Any:
        """Return a value as anybody may see it: a secret is masked, and that in an address."""
        if self.kind == "store" and value is not None:
            return masked_url(str(value))
        return MASK if self.secret and value not in (None, ()) else value

    def shown(self, value: object) -> str:
        """Return a value as a flag would have it, masked if it is secret; `-` for none."""
        value = self.public(value)
        if isinstance(value, tuple):
            return ",".join(map(str, value)) or "-"
        return "-" if value is None else str(value)

    def read(self, value: object, source: str) -> Any:
        """Return the value checked and converted.

        Raises:
            ConfigError: it does not fit; the message begins with `source`.
        """
        try:
            if isinstance(value, str) and self.kind == "bytes":
                value = size_bytes(value)
            if self.kind == "indices":
                value = indices(value)
            if self.kind == "list":
                value = texts(value)
            if self.kind == "urls":
                value = urls(value)
            if value is False and self.kind == "speculation":
                value = "off"  # which is how YAML spells false
            if isinstance(value, str) and self.choices:
                value = value.lower()
            checked = msgspec.convert(value, self.annotation, strict=False)
            self._check(checked)
        except ValueError as error:
            reason = str(error).partition(", got ")[0].replace("`", "")
            reason = reason[:1].lower() + reason[1:]
            given = self.public(value)
            raise ConfigError(f"{source}: {reason} (given: {given!r})") from None
        return checked

    def _check(self, value: object) -> None:
        choices = self.choices
        if self.kind == "backend":
            choices = backend_names()
        if self.kind in _POLICIES:
            _POLICIES[self.kind](str(value))
        if self.kind in _TEXTS and value is not None:
            _TEXTS[self.kind](str(value))
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
                bool(extra["secret"]),
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
        ConfigError: a key or a variable of ours is unknown, or a value bad.
    """
    environ = {name: value for name, value in environ.items() if not _linked(name, value)}
    ours = (name for name in environ if name.startswith(ENV_PREFIX))
    known = {*(setting.variable for setting in settings()), CONFIG_VARIABLE}
    _check_known(ours, known, "unknown variable", ENV_PREFIX)
    path = file or environ.get(CONFIG_VARIABLE)
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
    found = {str(key).replace("-", "_"): value for key, value in content.items()}
    _check_known(found, {setting.name for setting in settings()}, f"{path}: unknown key")
    return found


def _check_known(names: Iterable[str], known: set[str], what: str, prefix: str = "") -> None:
    """Return if all names are known.

    Args:
        what: how the message begins; what may have been meant follows.
        prefix: of all names, which makes none of them like another.

    Raises:
        ConfigError: one is not.
    """
    for name in names:
        if name not in known:
            bare = sorted(one.removeprefix(prefix) for one in known)
            near = get_close_matches(name.removeprefix(prefix), bare, n=1)
            hint = f"did you mean {prefix + near[0]!r}?" if near else f"known: {_listed(known)}"
            raise ConfigError(f"{what} {name!r}; {hint}")


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))


def _linked(name: str, value: str) -> bool:
    """Whether Kubernetes set a variable, for a service called `draftgate` or `draftgate-...`.

    So it may set DRAFTGATE_PORT, which is a setting of ours too: to `tcp://10.0.0.1:80`.
    """
    match = _OF_KUBERNETES.fullmatch(name)
    return match is not None and (match[2] != "PORT" or "://" in value)
