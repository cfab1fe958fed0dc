"""Test and measure the engine on a GPU machine for the first time, unattended.

    python -m bench.gpu.first_run --out FOLDER [--wheels FOLDER]

The machine needs Python 3.11 or newer, torch, Triton and NumPy, but no network, git or
installation. `make wheelhouse` downloads the other packages on a machine with a network.

Every stage is a process with a time limit, so a crash or a hang ends only its stage. A stage leaves
`NAME.json` and `NAME.log` in the folder, and writes its results as it measures them. The same
command again continues with the stages that have not ended well. `index.html` shows all results.

This module imports only the standard library, because it installs what the stages import.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

ROOT: Final = Path(__file__).parents[2]
WHEELS: Final = ROOT / "build" / "wheelhouse"
LOG_LINES: Final = 20
"""Last lines of the log in the result of a stage that failed."""


class Stage(NamedTuple):
    """A stage of the run, with what it answers and its limit in seconds."""

    name: str
    purpose: str
    limit_s: int = 580


STAGES: Final = (
    Stage("environment", "Versions, device, and packages that are missing", 120),
    Stage("kernels", "Every kernel against its reference, a process for each file"),
    Stage("engine", "Graphs, asynchronous launches, exact mode and proposers of the engine"),
    Stage("floors", "Every kernel against the bandwidth and the matrix rate"),
    Stage("rates", "Memory bandwidth and matrix rate", 180),
    Stage("steps-1b", "Steps of a random 1B model over batches and contexts"),
    Stage("steps-8b", "Steps of a random 8B model over batches and contexts"),
    Stage("steps-8b-fp8", "Steps of a random 8B model in FP8 with blocks of 128 x 128"),
    Stage("steps-8b-int4", "Steps of a random 8B model with weights of 4 bits in groups of 128"),
    Stage("steps-30b-a3b", "Steps of a random mixture of experts over batches and contexts"),
    Stage("profile", "Step costs of the 8B model as a profile for the simulator"),
    Stage("idle", "Share of time in which the GPU waits for the host, 8B"),
    Stage("replay", "off against replayed drafts of each recorded proposer, 8B"),
    Stage("skew", "63 short contexts and a long one in a step, 8B"),
    Stage("sampling", "Greedy steps against temperature, top-k and top-p at batch 1, 8B"),
    Stage("drafts", "Chains of a 1B draft model by the host, with separate launches and in graphs"),
    Stage("trees", "Trees of growing size, and whether a new size compiles a kernel"),
    Stage("shipped", "The shipped model end to end with every proposer"),
    Stage("exact", "Cost of exact mode, 1B"),
    Stage("transformers", "Steps of transformers in the same run, 1B"),
)

ENDED_WELL: Final = ("passed", "skipped")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the stages, and write the page.

    Raises:
        SystemExit: status 1 if a stage failed.
    """
    args = _parser().parse_args(arguments)
    if args.list:
        for stage in STAGES:
            print(f"{stage.name:16}{stage.purpose}")
        return
    args.out.mkdir(parents=True, exist_ok=True)
    environment = _environment(args.out, args.wheels)
    for stage in chosen(args.out, args.only, args.start):
        result = run_stage(stage, args, environment)
        reason = f": {result['reason']}" if "reason" in result else ""
        print(f"{stage.name}: {result['status']} after {result['seconds']} s{reason}", flush=True)
        write_page(args.out, environment)
    write_page(args.out, environment)
    print(args.out / "index.html")
    failed = [stage.name for stage in STAGES if _status(args.out, stage) in {"failed", "timeout"}]
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


def chosen(out: Path, only: Sequence[str], start: str | None) -> list[Stage]:
    """Return the stages to run.

    Args:
        only: names of stages that run even if they have ended well, or nothing for all others.
        start: first stage, which runs with all later stages even if they have ended well.
    """
    if only:
        return [stage for stage in STAGES if stage.name in only]
    if start is not None:
        names = [stage.name for stage in STAGES]
        return list(STAGES[names.index(start) :])
    return [stage for stage in STAGES if _status(out, stage) not in ENDED_WELL]


def run_stage(
    stage: Stage, args: argparse.Namespace, environment: dict[str, str]
) -> dict[str, Any]:
    """Run a stage in a process, write its result, and return it."""
    path = args.out / f"{stage.name}.json"
    path.unlink(missing_ok=True)
    command = [sys.executable, "-m", "bench.gpu.stage", stage.name, str(args.out.resolve())]
    command += ["--device", args.device, *(["--tiny"] if args.tiny else [])]
    started_s = time.monotonic()
    with (args.out / f"{stage.name}.log").open("w", encoding="utf-8") as log:
        # The command runs this package with trusted arguments. A session of its own can be ended
        # with all processes that the stage started.
        process = subprocess.Popen(  # noqa: S603
            command, cwd=ROOT, env=environment, stdout=log, stderr=log, start_new_session=True
        )
        try:
            code = process.wait(min(stage.limit_s, args.limit_s))
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _end(process)
    result = _result(path, code)
    if result["status"] != "passed" and "reason" not in result:
        log_text = (args.out / f"{stage.name}.log").read_text(encoding="utf-8", errors="replace")
        result["log"] = log_text.splitlines()[-LOG_LINES:]
    result |= {"stage": stage.name, "seconds": round(time.monotonic() - started_s, 1)}
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return result


def _result(path: Path, code: int | None) -> dict[str, Any]:
    """Return what a process wrote, with its status if it ended early."""
    result: dict[str, Any] = json.loads(path.read_text("utf-8")) if path.exists() else {}
    if code is None:
        result["status"] = "timeout"
    elif code or "status" not in result:
        result["status"] = "failed"
    return result


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the processes of a stage."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _status(out: Path, stage: Stage) -> str | None:
    try:
        status: str = json.loads((out / f"{stage.name}.json").read_text("utf-8"))["status"]
    except (OSError, ValueError, KeyError):
        return None
    return status


def _environment(out: Path, wheels: Path) -> dict[str, str]:
    """Return the variables of the stages, after installing the wheels into the output folder."""
    packages = (out / "packages").resolve()
    environment = dict(os.environ)
    if packages.is_dir() or (wheels.is_dir() and _installed(wheels, packages)):
        paths = [str(packages), environment.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    # Kernels stay compiled for a second run.
    environment.setdefault("TRITON_CACHE_DIR", str((out / "triton").resolve()))
    return environment


def _installed(wheels: Path, packages: Path) -> bool:
    """Install the wheels into a folder, and return whether pip succeeded.

    Without pip, or with wheels for another Python, the stages use the packages of the machine.
    """
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]
    command += ["--disable-pip-version-check", "--find-links", str(wheels)]
    requirements = ROOT / "bench" / "gpu" / "wheels.txt"
    command += ["--target", str(packages), "-r", str(requirements)]
    done = subprocess.run(command, check=False)  # noqa: S603 - trusted arguments
    if done.returncode:
        print(f"the wheels in {wheels} cannot be installed; the packages of the machine are used")
    return done.returncode == 0


def write_page(out: Path, environment: dict[str, str]) -> None:
    """Write `index.html` in a process that may import the installed packages."""
    command = [sys.executable, "-m", "bench.gpu.page", str(out.resolve())]
    subprocess.run(command, cwd=ROOT, env=environment, check=False)  # noqa: S603 - trusted arguments


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.gpu.first_run",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    names = [stage.name for stage in STAGES]
    add = parser.add_argument
    add("--out", type=Path, default=Path("runs/gpu"), help="folder of results (runs/gpu)")
    add("--wheels", type=Path, default=WHEELS, help="folder of wheels (build/wheelhouse)")
    add("--only", nargs="+", default=(), choices=names, help="run these stages")
    add("--from", dest="start", choices=names, help="run this stage and all later ones")
    add("--list", action="store_true", help="list the stages")
    add("--device", choices=("cuda", "cpu"), default="cuda")
    add("--tiny", action="store_true", help="rehearse with tiny models and few steps")
    add("--limit-s", type=int, default=580, help="longest time of a stage, in seconds (580)")
    return parser


if __name__ == "__main__":
    main()
