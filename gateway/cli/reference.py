"""Pages of the documentation that are made from declarations.

    python -m gateway.cli.reference docs/reference

writes `settings.md` and `metrics.md` into that folder (`make docs`). A test holds the pages of the
repository to what this writes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Final

from draftgate.gateway.cli.options import metavar, shown_default
from draftgate.gateway.config import Setting, settings
from draftgate.gateway.telemetry.figures import FIGURES, Figure
from draftgate.gateway.telemetry.metrics import shown_name

_SETTINGS = """\
# Settings

Each is a flag, a variable and a key of a YAML file (`--config FILE` or `DRAFTGATE_CONFIG`); a flag
wins over the variable, that over the file, that over the default. Keys and `DRAFTGATE_*` variables
that do not exist are refused. `draftgate config show` tells what is in force and where it comes
from, with `--json` for programs; what is secret is masked.

A list is the flag again and again, a list in YAML, or one text with commas between its entries.
Sizes take units (`512MiB`, `2GB`).

"""


def settings_page(all_settings: Sequence[Setting]) -> str:
    """Return the page about settings, in Markdown."""
    rows = [
        (
            f"`{setting.flag}`",
            "" if setting.boolean else _code(metavar(setting)),
            _code(shown_default(setting)),
            f"`{setting.variable}`",
            setting.help + ("; secret" if setting.secret else ""),
        )
        for setting in all_settings
    ]
    return _SETTINGS + _table(("flag", "value", "default", "variable", "what it is"), rows)


_METRICS = """\
# Metrics

`GET /metrics` is Prometheus' text format, or OpenMetrics for who accepts it. Every figure is
declared once (`gateway/telemetry/figures.py`) and has the label `model_name`. It appears under its
own name and, where there is one, under those of vLLM and of OpenTelemetry's GenAI conventions, so
that dashboards and benchmarks made for these read it unchanged. In `gen_ai_*` figures the labels
are `gen_ai_request_model`, `gen_ai_operation_name` and `gen_ai_provider_name`; in `vllm:*` figures,
requests that ended in an error have no duration, as there.

A label takes its first 100 values; further ones are counted as `other`. Not there, because no
worker tells it: `vllm:num_preemptions_total`.

"""


def metrics_page(figures: Sequence[Figure]) -> str:
    """Return the page about metrics, in Markdown."""
    rows = [
        (
            f"`{shown_name(figure, figure.name)}`",
            figure.kind.value,
            figure.unit,
            " ".join(f"`{label}`" for label in figure.labels),
            figure.text.replace("|", "\\|"),
            " ".join(f"`{shown_name(figure, alias)}`" for alias in figure.aliases),
        )
        for figure in figures
    ]
    return _METRICS + _table(("name", "kind", "unit", "labels", "what it is", "also as"), rows)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _code(text: str) -> str:
    return f"`{text}`".replace("|", "\\|") if text else ""


PAGES: Final[dict[str, Callable[[], str]]] = {
    "settings.md": lambda: settings_page(settings()),
    "metrics.md": lambda: metrics_page(FIGURES),
}
"""File name and maker of each page."""


def main(arguments: Sequence[str]) -> None:
    """Write the pages into the folder."""
    (folder,) = arguments
    for name, page in PAGES.items():
        (Path(folder) / name).write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
