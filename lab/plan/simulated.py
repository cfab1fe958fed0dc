"""The simulated requests of a plan, in its JSON file and on its page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from draftgate.lab.simulate.experiment import NEVER_LATE
from draftgate.loadgen.measuring.metrics import METRICS
from draftgate.loadgen.measuring.summary import summarize
from draftgate.loadgen.report.charts import ChartSeries, distribution_chart
from draftgate.loadgen.report.html import html_chart
from draftgate.loadgen.types import LoadRun, Record


def summary_of(records: Sequence[Record]) -> dict[str, Any]:
    """Return the `summary/1` of simulated requests, of which there is at least one."""
    last_s = max(record.end_s for record in records)
    last_due_s = max(record.scheduled_s for record in records)
    return summarize(LoadRun({}, list(records), last_s, last_due_s, NEVER_LATE))


def latency_charts(records: Sequence[Record]) -> str:
    """Return the distributions of TTFT and TPOT, as HTML."""
    series = [ChartSeries("plan", records)]
    charts = [distribution_chart(METRICS[key], series) for key in ("ttft_s", "tpot_s")]
    return f'<div class="charts">{"".join(html_chart(one) for one in charts if one.data)}</div>'
