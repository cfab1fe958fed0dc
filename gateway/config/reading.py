"""The effective settings of a node.

A flag overrides the environment, the environment overrides the file, and the file overrides the
default.
"""

from __future__ import annotations

import ast
import inspect
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from itertools import pairwise
from pathlib import Path
from pkgutil import resolve_name
from types import UnionType
from typing import Any, Final, Union, get_args, get_origin, get_type_hints

import msgspec

from draftgate.addresses import MASK, mask_url
from draftgate.backends.engine.cpu_isa import VARIABLE as CPU_ISA_VARIABLE
from draftgate.backends.worker_config import UpstreamSettings, WorkerSettings
from draftgate.gateway.config.schema import MODEL_PANELS, PANELS, ServeConfig
from draftgate.gateway.config.values import (
    is_variable,
    read_bytes,
    read_collector,
    read_fallbacks,
    read_hosts,
    read_indices,
    read_list,
    read_models,
    read_origins,
    read_shares,
    read_upstreams,
    read_url,
    read_urls,
)
from draftgate.gateway.decoding_errors import TYPE_NAMES, yaml_problem

ENV_PREFIX: Final = "DRAFTGATE_"

CONFIG_VARIABLE: Final = ENV_PREFIX + "CONFIG"
"""The variable that names the configuration file, like `--config`."""

_KUBERNETES_LINK: Final = re.compile(
    ENV_PREFIX
    + r"([A-Z0-9_]+?_)??(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\d+_(TCP|UDP|SCTP)(_\w+)?)?)"
)

_READERS: Final[Mapping[str, Callable[[object], object]]] = {
    "bytes": read_bytes,
    "collector": read_collector,
    "fallbacks": read_fallbacks,
    "hosts": read_hosts,
    "indices": read_indices,
    "list": read_list,
    "models": read_models,
    "origins": read_origins,
    "shares": read_shares,
    "upstreams": read_upstreams,
    "url": read_url,
    "urls": read_urls,
}
"""Functions that convert a value before the type check, by kind of setting."""

_CHECKS: Final = {
    "backend": "draftgate.gateway.config.values:check_backend",
    "pool": "draftgate.gateway.config.values:check_pool",
    "variable": "draftgate.gateway.config.values:check_variable",
    "store": "draftgate.gateway.state.redis.url:read_redis_url",
    "speculation": "draftgate.policies.registry:speculation_policy",
    "batching": "draftgate.policies.registry:batching_policy",
    "ordering": "draftgate.policies.registry:ordering_policy",
    "admission": "draftgate.policies.registry:admission_policy",
    "routing": "draftgate.policies.registry:routing_policy",
    "rescheduling": "draftgate.policies.registry:rescheduling_policy",
    "phases": "draftgate.policies.registry:phases_policy",
}
"""Functions that reject an invalid text, by kind of setting. Each is imported on first use, because
policies import numpy."""

_FLAGS: Final = {
    "model": "MODEL",
    "models": "--model",
    "embedders": "--embedder",
    "fallbacks": "--fallback",
    "loras": "--lora",
    "memory_shares": "--memory-share",
}
"""The names on the command line that differ from those of the fields. A repeatable flag has one
value, and its field has all of them."""


class ConfigError(ValueError):
    """A setting is unknown or has an invalid value.

    The message is one line that names the setting.
    """


@dataclass(frozen=True, slots=True)
class Setting:
    """One field of `ServeConfig`, with its names and its conversions from and to text."""

    name: str
    annotation: Any
    default: Any
    help: str
    panel: str = ""
    kind: str = ""
    choices: tuple[str, ...] = ()
    secret: bool = False

    @property
    def flag(self) -> str:
        """The name on the command line."""
        return _FLAGS.get(self.name) or "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        """The name in the environment."""
        return ENV_PREFIX + self.name.upper()

    @property
    def type(self) -> Any:
        """The type of the value, without its bounds and without None."""
        return _parts(self.annotation)[0]

    @property
    def server(self) -> bool:
        """Whether the setting concerns only the server, not the model."""
        return self.panel not in MODEL_PANELS

    def public(self, value: Any) -> Any:
        """Return a value, valid or not, with its secrets masked.

        Everything that shows a setting shows this value.
        """
        if isinstance(value, UpstreamSettings):
            return value.shown
        if isinstance(value, dict):  # valid only as pairs, and otherwise of unknown meaning
            pairs = self.kind in {"models", "shares", "fallbacks"}
            return {key: self.public(item) if pairs else MASK for key, item in value.items()}
        if isinstance(value, list | tuple) and not self.secret:
            return type(value)(map(self.public, value))
        if value in (None, ()) or isinstance(value, bool):
            return value
        if self.secret or (self.kind == "variable" and not is_variable(str(value))):
            return MASK
        is_url = self.kind in {"store", "url", "urls", "upstreams", "collector"}
        return mask_url(value) if isinstance(value, str) and (is_url or "://" in value) else value

    def shown(self, value: object) -> str:
        """Return a value as flag text, masked if the setting is secret, or `-` for None."""
        value = self.public(value)
        if isinstance(value, tuple):
            return ",".join(map(str, value)) or "-"
        return "-" if value is None else str(value)

    def read(self, value: object, source: str) -> Any:
        """Return the checked and converted value.

        Args:
            value: the raw value from a flag, the environment or the file.
            source: the origin of the value, which begins the error message.

        Raises:
            ConfigError: the value is invalid.
        """
        try:
            if self.kind in _READERS:
                value = _READERS[self.kind](value)
            elif self.kind == "speculation" and value is False:
                value = "off"  # YAML reads a bare `off` as false
            elif isinstance(value, str) and self.choices:
                value = value.lower()
            checked = msgspec.convert(value, self.annotation, strict=False)
            self._check(checked)
        except ValueError as error:
            raise ConfigError(
                f"{source}: {_plain(error)} (given: {self.public(value)!r})"
            ) from None
        return checked

    def _check(self, value: object) -> None:
        if value is not None and self.kind in _CHECKS:
            resolve_name(_CHECKS[self.kind])(str(value))
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError("expected a finite number")
        if self.choices and value not in self.choices:
            raise ValueError(f"expected one of {', '.join(self.choices)}")


@dataclass(frozen=True, slots=True)
class EffectiveConfig:
    """The effective settings of a node, and the origin of each setting."""

    config: ServeConfig
    origins: Mapping[str, str]


@cache
def settings() -> tuple[Setting, ...]:
    """Return every setting, in the order of the help page."""
    hints = get_type_hints(ServeConfig, include_extras=True)
    fields = {field.name: field for field in msgspec.structs.fields(ServeConfig)}
    texts = _field_docstrings(WorkerSettings) | _field_docstrings(ServeConfig)
    return tuple(
        Setting(
            name,
            hints[name],
            fields[name].default,
            texts[name],
            panel,
            **(_parts(hints[name])[1].extra or {}),
        )
        for panel, names in PANELS.items()
        for name in names
    )


def _field_docstrings(struct: type[msgspec.Struct]) -> dict[str, str]:
    """Return the docstrings below the fields of a class, which Python keeps only in the source."""
    (declared,) = ast.parse(inspect.getsource(struct)).body
    assert isinstance(declared, ast.ClassDef)
    found = {}
    for field, below in pairwise(declared.body):
        if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr):
            found[ast.unparse(field.target)] = " ".join(ast.literal_eval(below.value).split())
    return found


def _parts(annotation: Any) -> tuple[Any, msgspec.Meta]:
    """Return the type of a field without None and bounds, and its metadata."""
    if get_origin(annotation) in {Union, UnionType}:
        annotation = get_args(annotation)[0]
    if hasattr(annotation, "__metadata__"):
        return annotation.__origin__, annotation.__metadata__[0]
    return annotation, msgspec.Meta()


def _plain(error: ValueError) -> str:
    """Return the message of an error with plain words for the names of Python's types."""
    reason = str(error).partition(", got ")[0].replace(" | null", "")
    reason = re.sub(r"`(\w+)`", lambda match: TYPE_NAMES.get(match[1], match[1]), reason)
    return reason[:1].lower() + reason[1:]


def effective_config(
    flags: Mapping[str, object], environ: Mapping[str, str], file: str | None = None
) -> EffectiveConfig:
    """Merge flags, environment, file and defaults.

    Args:
        flags: values by field name, with None for flags that were not given.
        environ: the environment.
        file: path of the YAML file, or None to use `DRAFTGATE_CONFIG`.

    Raises:
        ConfigError: a key or a `DRAFTGATE_` variable is unknown, or a value is invalid.
    """
    environ = {name: value for name, value in environ.items() if not _is_link(name, value)}
    ours = (name for name in environ if name.startswith(ENV_PREFIX))
    known = settings()
    variables = {*(setting.variable for setting in known), CONFIG_VARIABLE, CPU_ISA_VARIABLE}
    _check_known(ours, variables, "unknown variable", ENV_PREFIX)
    path = file or environ.get(CONFIG_VARIABLE)
    from_file = _read_file(Path(path), {setting.name for setting in known}) if path else {}
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for setting in known:
        raw, origin = setting.default, "default"
        if flags.get(setting.name) is not None:
            raw, origin = flags[setting.name], setting.flag
        elif setting.variable in environ:
            raw, origin = environ[setting.variable], setting.variable
        elif setting.name in from_file:
            raw, origin = from_file[setting.name], f"{path}: {setting.name}"
        values[setting.name] = raw if origin == "default" else setting.read(raw, origin)
        origins[setting.name] = origin
    own = ("model", "models", "embedders", "no_worker")
    if values["upstream"] and origins["backend"] == "default" and not any(map(values.get, own)):
        # A node that names upstreams and no model of its own only forwards requests.
        values["backend"], origins["backend"] = "openai", origins["upstream"]
    return EffectiveConfig(ServeConfig(**values), origins)


def _read_file(path: Path, known: set[str]) -> dict[str, object]:
    import yaml

    written = b""
    try:
        written = path.read_bytes()
        content = yaml.safe_load(written.decode("utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {yaml_problem(error, written)}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: expected a mapping of settings")
    found = {str(key).replace("-", "_"): value for key, value in content.items()}
    _check_known(found, known, f"{path}: unknown key")
    return found


def _check_known(names: Iterable[str], known: set[str], what: str, prefix: str = "") -> None:
    """Reject unknown names.

    Args:
        what: the beginning of the message, before the name.
        prefix: a prefix of all names, which the search for a similar name ignores.

    Raises:
        ConfigError: a name is unknown.
    """
    for name in names:
        if name not in known:
            bare = sorted(one.removeprefix(prefix) for one in known)
            near = get_close_matches(name.removeprefix(prefix), bare, n=1)
            listed = ", ".join(sorted(known))
            hint = f"did you mean {prefix + near[0]!r}?" if near else f"known: {listed}"
            raise ConfigError(f"{what} {name!r}; {hint}")


def _is_link(name: str, value: str) -> bool:
    """Return whether Kubernetes set a variable for a service named `draftgate` or `draftgate-...`.

    Kubernetes sets such variables in every pod. `DRAFTGATE_PORT` is also a setting, but Kubernetes
    gives it a value like `tcp://10.0.0.1:80`.
    """
    match = _KUBERNETES_LINK.fullmatch(name)
    return match is not None and (match[2] != "PORT" or "://" in value)
