"""What every study says of itself, and where its results go."""

from __future__ import annotations

import argparse
import datetime as dt
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from bench.harness.recording import command_line, commit
from draftgate import __version__
from draftgate.loadgen.report.html import html_page


def study_parser(
    name: str, description: str | None, *, device: bool = True
) -> argparse.ArgumentParser:
    """Return a parser with what all studies take.

    Args:
        device: whether one is simulated, by a profile.
    """
    parser = argparse.ArgumentParser(prog=f"draftgate bench {name}", description=description)
    if device:
        parser.add_argument(
            "--profile", default="h100-8b", help="of the device: shipped, or a file"
        )
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--html", type=Path, help="write a page here")
    return parser


def provenance(name: str, arguments: Sequence[str] | None) -> dict[str, Any]:
    """Return command, commit, device, version and date. Files are named without their folders."""
    given = sys.argv[1:] if arguments is None else arguments
    return {
        "command": command_line(f"draftgate bench {name}", given),
        "commit": commit(),
        "device": "simulated",
        "draftgate": __version__,
        "date": dt.datetime.now(dt.UTC).date().isoformat(),
    }


def write_results(
    args: argparse.Namespace, results: dict[str, Any], title: str, body: Iterable[str]
) -> None:
    """Write the JSON and the page, as far as they were asked for."""
    if args.json is not None:
        args.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    if args.html is not None:
        args.html.write_text(html_page(title, body), encoding="utf-8")
