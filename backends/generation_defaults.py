"""The sampling parameters that a checkpoint recommends, which apply to requests that set none.

They are those of `generation_config.json` that vLLM takes, too. The file of a chat model usually
has a temperature and `top_p`, without which the model writes worse text.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from draftgate.backends.errors import CheckpointError
from draftgate.backends.tokenizer import read_json
from draftgate.policies.values import immutable

FILE: Final = "generation_config.json"

AUTO: Final = "auto"
NONE: Final = frozenset({"none", "vllm"})
"""The values of the setting for the checkpoint's own file, and for no file. vLLM calls the latter
`vllm`."""

BOUNDS: Final[Mapping[str, tuple[float, float]]] = {
    "temperature": (0.0, math.inf),
    "top_p": (0.0, 1.0),
    "top_k": (-1, math.inf),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (0.01, 100.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "max_new_tokens": (1, math.inf),
}
"""The range of each field that is read, which is that of the same parameter of a request."""

_WHOLE: Final = frozenset({"top_k", "max_new_tokens"})


@immutable
class GenerationDefaults:
    """The parameters of requests that do not set them, or None for the defaults of the API.

    Attributes:
        max_new_tokens: maximum number of output tokens of a chat, as far as the context has room.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    max_new_tokens: int | None = None

    def given(self) -> dict[str, Any]:
        """Return the parameters that are not None."""
        values = ((name, getattr(self, name)) for name in BOUNDS)
        return {name: value for name, value in values if value is not None}


def read_generation_defaults(setting: str, directory: Path) -> GenerationDefaults:
    """Return the defaults of a model.

    Args:
        setting: `auto` for the file of the checkpoint, `none` for no file, or the path of another
            file or of its directory.
        directory: directory of the checkpoint.

    Raises:
        CheckpointError: the file is damaged, a value is out of its range, or no file is at the
            given path.
    """
    if setting in NONE:
        return GenerationDefaults()
    path = directory if setting == AUTO else Path(setting).expanduser()
    path = path / FILE if path.is_dir() or setting == AUTO else path
    fields = read_json(path, missing={} if setting == AUTO else None)
    return GenerationDefaults(**dict(_values(fields, path)))


def _values(fields: Mapping[str, Any], path: Path) -> Iterator[tuple[str, Any]]:
    """Yield the parameters that the fields of a file set."""
    for name in BOUNDS:
        if fields.get(name) is not None:
            yield name, _checked(name, fields[name], path)
    # In transformers, this switch alone decides whether the model samples.
    if fields.get("do_sample") is False:
        yield "temperature", 0.0


def _checked(name: str, value: object, path: Path) -> float:
    least, most = BOUNDS[name]
    number = value if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
    whole = name in _WHOLE
    if not (math.isfinite(number) and least <= number <= most) or (whole and number % 1):
        bounds = f"at least {least:g}" if math.isinf(most) else f"{least:g} to {most:g}"
        raise CheckpointError(
            f"{path}: {name} must be a{' whole' if whole else ''} number, {bounds}, not {value!r}; "
            "--generation-config none starts without the file"
        )
    return int(number) if whole else float(number)
