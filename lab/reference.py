"""Generator of the reference pages.

    python -m draftgate.lab.reference docs/reference

The command writes `settings.md`, `metrics.md` and `request-fields.md` into that folder (`make
docs`). A test compares the committed pages with the generated ones.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

from draftgate.gateway.cli.options import metavar, shown_default
from draftgate.gateway.config import Setting, settings
from draftgate.gateway.config.schema import PANELS
from draftgate.gateway.http.requests.inventory import (
    EMBEDDING,
    GENERATION,
    SCORING,
    TOKENS,
    FieldLists,
)
from draftgate.gateway.telemetry.metric_definitions import METRICS
from draftgate.gateway.telemetry.metric_form import MetricDefinition
from draftgate.gateway.telemetry.metrics import shown_name

_SETTINGS = """\
# Settings

Each setting is an option of `draftgate serve`, an environment variable and a key of a YAML file.
`--config FILE` or `DRAFTGATE_CONFIG` names that file. An option overrides the variable, the
variable overrides the file, and the file overrides the default. Unknown keys and unknown
`DRAFTGATE_*` variables are errors. `draftgate config show` prints the effective values and their
origins, with secrets masked. `draftgate config show --json` prints them as JSON.

To give a list, repeat the option, use a YAML list, or write a comma-separated string. All of
them mean the same, and a comma always separates. A key with a comma belongs into `--api-keys-file`,
and `%2C` is a comma in a URL. Sizes accept units (`512MiB`, `2GB`).

Addresses of servers begin with `http://` or `https://`. A final `/v1` is not part of an address.

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


_FIELDS = """\
# Request fields

The server implements the fields that `/openapi.json` describes. This page lists the other fields
of OpenAI, Anthropic, vLLM, SGLang and llama.cpp's server: other names of implemented fields, fields
that the server refuses with status 400, and fields that cannot change a response. An implemented
field takes precedence over these lists. The path `*.name` means the field of any nested object.
"""

_ENDPOINTS: Final = {
    "Endpoints that generate text": GENERATION,
    "Embeddings": EMBEDDING,
    "Reranking and scores": SCORING,
    "Tokens": TOKENS,
}


def fields_page(lists: Mapping[str, FieldLists]) -> str:
    """Return the page about request fields that are not implemented, in Markdown."""
    sections = []
    for title, one in lists.items():
        rows = [
            (f"`{name}`", f"the same as {' or '.join(f'`{usual}`' for usual in names)}", "")
            for name, names in sorted(one.aliases.items())
        ]
        rows += [
            (f"`{name}`", f"refused: {advice}", " ".join(f"`{json.dumps(v)}`" for v in neutral))
            for name, (advice, neutral) in sorted(one.refused.items())
        ]
        rows += [
            (f"`{name}`", f"harmless: {reason}", "")
            for name, reason in sorted(one.harmless.items())
        ]
        head = ("field", "effect", "accepted values besides null")
        sections.append(f"\n## {title}\n\n{_table(head, rows)}")
    return _FIELDS + "".join(sections)


PAGES: Final[dict[str, Callable[[], str]]] = {
    "settings.md": lambda: settings_page(settings()),
    "metrics.md": lambda: metrics_page(METRICS),
    "request-fields.md": lambda: fields_page(_ENDPOINTS),
}
"""Functions that return the text of each page, by file name."""


def main(arguments: Sequence[str]) -> None:
    """Write the pages into the folder that is the only argument."""
    (folder,) = arguments
    for name, page in PAGES.items():
        (Path(folder) / name).write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
