"""Texts for the query tower: the standard library and installed packages.

The modules of the standard library that `is_held_out` selects are the test collection of the `rag`
workload. `HELD_OUT_PACKAGES` are a second collection. The training drops queries that occur there.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from hashlib import sha256
from importlib import metadata
from pathlib import Path
from typing import Final, NamedTuple

from draftgate.loadgen.planning.pairs import is_held_out

PACKAGES: Final = {
    "aiohttp": "aiohttp",
    "anthropic": "anthropic",
    "coverage": "coverage",
    "fsspec": "fsspec",
    "graphql-core": "graphql",
    "huggingface-hub": "huggingface_hub",
    "jinja2": "jinja2",
    "joblib": "joblib",
    "mpmath": "mpmath",
    "mypy": "mypy",
    "narwhals": "narwhals",
    "networkx": "networkx",
    "numpy": "numpy",
    "openai": "openai",
    "opentelemetry-sdk": "opentelemetry",
    "packaging": "packaging",
    "pip": "pip",
    "plotly": "plotly",
    "pydantic": "pydantic",
    "pygments": "pygments",
    "pytest": "_pytest",
    "redis": "redis",
    "rich": "rich",
    "schemathesis": "schemathesis",
    "scikit-learn": "sklearn",
    "scipy": "scipy",
    "sentence-transformers": "sentence_transformers",
    "setuptools": "setuptools",
    "sympy": "sympy",
    "torch": "torch",
    "transformers": "transformers",
    "triton": "triton",
    "werkzeug": "werkzeug",
}
"""Distributions of the development environment with over 150 pairs and a permissive licence (MIT,
BSD, Apache 2.0), and their packages. The licences are in metrics.json."""

HELD_OUT_PACKAGES: Final = {
    "anyio": "anyio",
    "attrs": "attr",
    "click": "click",
    "filelock": "filelock",
    "httpcore": "httpcore",
    "httpx": "httpx",
    "hypothesis": "hypothesis",
    "jsonschema": "jsonschema",
    "prometheus-client": "prometheus_client",
    "psutil": "psutil",
    "pyzmq": "zmq",
    "requests": "requests",
    "tqdm": "tqdm",
    "typer": "typer",
    "urllib3": "urllib3",
}
"""Distributions of a second test collection, and their packages."""

SKIPPED_FOLDERS: Final = frozenset({"_vendor", "vendor", "__pycache__"})
"""Folders of copied packages, whose licences may differ."""

STDLIB_SKIPPED: Final = frozenset(
    {"__pycache__", "encodings", "idlelib", "lib2to3", "site-packages", "dist-packages"}
    | {"test", "tests", "turtledemo", "ensurepip", "lib-dynload"}
)
"""Folders without documented functions, or with tests, which name the modules that they test."""

VALIDATION_ONE_IN: Final = 12
"""One of this many units (a module, or a file of a package) is left out to validate recipes."""


class Source(NamedTuple):
    """The text of a file.

    Attributes:
        unit: what the split into training and validation keeps together.
        package: the distribution, or an empty string for the standard library.
    """

    unit: str
    package: str
    text: str


def stdlib_root() -> Path:
    """Return the folder of the running interpreter's standard library."""
    return Path(sysconfig.get_path("stdlib"))


def top_module(name: str) -> str:
    """Return the top-level module of a file's path below the library's root."""
    return Path(name).parts[0].removesuffix(".py")


def is_trained_on(name: str) -> bool:
    """Return whether a file of the standard library may be read for training.

    Args:
        name: its path below the library's root, such as `email/header.py`.
    """
    parts = Path(name).parts
    return not STDLIB_SKIPPED & set(parts[:-1]) and not is_held_out(top_module(name))


def stdlib_sources(*, held_out: bool = False) -> list[Source]:
    """Return the files of the standard library to train on, or those of held-out modules."""
    root = stdlib_root()
    names = sorted(path.relative_to(root).as_posix() for path in root.rglob("*.py"))
    names = [name for name in names if not {"site-packages", "dist-packages"} & {*Path(name).parts}]
    chosen = [n for n in names if (is_held_out(top_module(n)) if held_out else is_trained_on(n))]
    return [Source(top_module(n), "", _read(root / n)) for n in chosen]


def package_sources(packages: Mapping[str, str] = PACKAGES) -> Iterator[Source]:
    """Yield the files of installed distributions.

    Args:
        packages: the package of each distribution.
    """
    site = Path(sysconfig.get_path("purelib"))
    for package, folder_name in packages.items():
        folder = site / folder_name
        for path in sorted(folder.rglob("*.py")):
            name = path.relative_to(site).as_posix()
            if not SKIPPED_FOLDERS & set(path.parts):
                yield Source(name, package, _read(path))


def is_validation(unit: str) -> bool:
    """Return whether a unit is left out of training to validate recipes."""
    digest = sha256(f"validation {unit}".encode()).hexdigest()
    return int(digest, 16) % VALIDATION_ONE_IN == 0


def licences(packages: Iterable[str] = PACKAGES) -> dict[str, str]:
    """Return the version and licence of each installed distribution."""
    return {name: _licence(metadata.metadata(name)) for name in packages}


def _licence(facts: metadata.PackageMetadata) -> str:
    found = facts.json
    classifiers = [c for c in found.get("classifier", []) if str(c).startswith("License")]
    texts = (found.get("license_expression"), *classifiers, found.get("license"))
    licence = next((str(t).splitlines()[0] for t in texts if t), "")
    return f"{found['version']}, {licence.rpartition(':: ')[2]}"


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")
