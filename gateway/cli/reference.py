"""Generator of the reference pages.

    python -m draftgate.gateway.cli.reference docs/reference

The command writes `settings.md` and `metrics.md` into that folder (`make docs`). A test compares
the committed pages with the generated ones.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Final

from draftgate.gateway.cli.options import metavar, shown_default
from draftgate.gateway.config import Setting, settings
from draftgate.gateway.config.schema import PANELS
from draftgate.gateway.telemetry.metric_definitions import METRICS, MetricDefinition
from draftgate.gateway.telemetry.metrics import shown_name

_SETTINGS = """\
# Settings

Each setting is an option of `draftgate serve`, an environment variable and a key of a YAML file.
`--config FILE` or `DRAFTGATE_CONFIG` names that file. An option overrides the variable, the
variable overrides the file, and the file overrides the default. Unknown keys and unknown
`DRAFTGATE_*` variables are errors. `draftgate config show` prints the effective values and their
origins, with secrets masked. `draftgate config show --json` prints them as JSON.

To give a list, repeat the option, use a YAML list, or write a comma-separated string. Sizes accept
units (`512MiB`, `2GB`).

`DRAFTGATE_CPU_ISA` exists only as a variable. The values `sse4`, `avx2` and `avx512` limit a CPU
worker to that instruction set, for tests and comparisons of machines.
"""


def settings_page(all_settings: Sequence[Setting]) -> str:
    """Return the settings page in Markdown."""
    head = ("option", "value", "default", "variable", "description")
    sections = []
    for panel in PANELS:
        rows = [
            (
                f"`{setting.flag}`",
                "" if setting.type is bool else _code(metavar(setting)),
                _code(shown_default(setting)),
                f"`{setting.variable}`",
                setting.help + (" Secret." if setting.secret else ""),
            )
            for setting in all_settings
            if setting.panel == panel
        ]
        sections.append(f"\n## {panel}\n\n{_table(head, rows)}")
    return _SETTINGS + "".join(sections)


_METRICS = """\
# Metrics

`GET /metrics` returns Prometheus' text format, or OpenMetrics to clients that accept it. Every
metric is declared once, in `gateway/telemetry/metric_definitions.py`, and has the label
`model_name`. A metric that vLLM or OpenTelemetry's GenAI conventions define also appears under
their names, so that existing dashboards and benchmarks work unchanged. The labels of `gen_ai_*`
metrics are `gen_ai_request_model`, `gen_ai_operation_name` and `gen_ai_provider_name`. The
durations in `vllm:*` metrics exclude requests that ended in an error, as in vLLM.

Each label keeps its first 100 values and counts later values as `other`.
`vllm:num_preemptions_total` is not available, because no worker reports it.

"""


def metrics_page(definitions: Sequence[MetricDefinition]) -> str:
    """Return the metrics page in Markdown."""
    rows = [
        (
            f"`{shown_name(metric, metric.name)}`",
            metric.kind.value,
            metric.unit,
            " ".join(f"`{label}`" for label in metric.labels),
            metric.text.replace("|", "\\|"),
            " ".join(f"`{shown_name(metric, alias)}`" for alias in metric.aliases),
        )
        for metric in definitions
    ]
    return _METRICS + _table(("name", "kind", "unit", "labels", "description", "also as"), rows)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _code(text: str) -> str:
    return f"`{text}`".replace("|", "\\|") if text else ""


PAGES: Final[dict[str, Callable[[], str]]] = {
    "settings.md": lambda: settings_page(settings()),
    "metrics.md": lambda: metrics_page(METRICS),
}
"""Functions that return the text of each page, by file name."""


def main(arguments: Sequence[str]) -> None:
    """Write the pages into the folder that is the only argument."""
    (folder,) = arguments
    for name, page in PAGES.items():
        (Path(folder) / name).write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
