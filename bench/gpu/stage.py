"""Runs one stage of `bench.gpu.first_run` in this process, and writes its result."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from bench.gpu.setting import Setting, Skipped

Run = Callable[[Setting], dict[str, Any]]

MODULES: Final = {
    "environment": "checks",
    "kernels": "checks",
    "engine": "checks",
    "floors": "checks",
    "rates": "steps",
    "steps-1b": "steps",
    "steps-8b": "steps",
    "steps-8b-fp8": "steps",
    "steps-8b-int4": "steps",
    "steps-30b-a3b": "steps",
    "profile": "steps",
    "exact": "steps",
    "transformers": "steps",
    "idle": "workloads",
    "replay": "workloads",
    "shipped": "workloads",
    "skew": "shapes",
    "sampling": "shapes",
    "trees": "shapes",
    "drafts": "drafts",
}
"""Module of `bench.gpu` with the function of each stage. A stage imports only what it needs."""


def stage_function(name: str) -> Run:
    """Return the function of a stage: `steps-1b` is `run_steps_1b`."""
    module = importlib.import_module(f"bench.gpu.{MODULES[name]}")
    run: Run = getattr(module, f"run_{name.replace('-', '_')}")
    return run


def main(arguments: list[str] | None = None) -> None:
    """Run a stage and write its JSON.

    Raises:
        SystemExit: status 1 if the stage found a fault.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=MODULES)
    parser.add_argument("out", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args(arguments)
    setting = Setting(args.name, args.out, args.device, args.tiny)
    try:
        result = {"status": "passed", **stage_function(args.name)(setting)}
    except Skipped as skipped:
        result = {"status": "skipped", "reason": str(skipped)}
    setting.keep(result)
    if result["status"] == "failed":
        raise SystemExit(1)


if __name__ == "__main__":
    main()
