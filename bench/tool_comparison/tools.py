"""Commands and result parsers of the compared load generators.

Each tool gets a constant rate, the shipped tokenizer, and the server's token counts if it supports
them. All tools use chat completions except inference-perf, which generates prompts of a given
length only for completions.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

from bench.tool_comparison.cases import RATE, TPOT_LIMIT_MS, TTFT_LIMIT_MS, Case
from bench.tool_comparison.mock import MODEL
from bench.tool_comparison.rivals import PACKAGES, python_of
from draftgate.backends.checkpoints import SHIPPED_MODEL

Metrics = dict[str, float | None]
"""Metrics by name, with the unit as suffix (`_ms`, `_rps`, `_tokens_per_s`). A missing metric is
None."""

PROMPT_TOKENS: Final = 64
DRAFTGATE: Final = "draftgate load"

_VLLM: Final = """
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""
"""Program that runs `vllm bench serve` without vLLM's server, which a CPU build cannot import."""


@dataclass(frozen=True, slots=True)
class Tool:
    """A load generator.

    Attributes:
        command: function that returns the command line for a case, the server's URL and a folder.
        read: function that reads the metrics from that folder.
        variables: environment variables of the tool.
    """

    name: str
    command: Callable[[Case, str, Path], Sequence[str]]
    read: Callable[[Path], Metrics]
    variables: Mapping[str, str] = field(default_factory=dict)


def _spread(name: str, of: Callable[[str], float | None]) -> Metrics:
    """Return mean, median and 99th percentile of a metric, in milliseconds."""
    return {f"{name}_{column}_ms": of(column) for column in ("mean", "p50", "p99")}


def draftgate_command(case: Case, url: str, folder: Path) -> list[str]:
    """Return Draftgate's command, without a limit of concurrent requests."""
    prompt = " ".join(["return"] * PROMPT_TOKENS)
    return [
        *(sys.executable, "-m", "draftgate.loadgen", url, "--chat", "--prompt", prompt),
        *("--max-tokens", str(case.tokens), "--rate", f"{RATE:g}", "--arrival", "constant"),
        *("--requests", str(case.requests), "--slo-ttft-ms", f"{TTFT_LIMIT_MS:g}"),
        *("--slo-tpot-ms", f"{TPOT_LIMIT_MS:g}", "--json", str(folder / "draftgate.json")),
        *("--events", str(folder / "events.jsonl")),
    ]


def read_draftgate(folder: Path) -> Metrics:
    """Return the metrics of a `summary/1` file."""
    report = json.loads((folder / "draftgate.json").read_text(encoding="utf-8"))
    figures, failed = report["details"]["figures"], sum(report["errors"].values())

    def of(key: str, column: str) -> float | None:
        return figures[key][column] * 1e3 if figures[key] else None

    ok = report["requests"] - failed
    return {
        "ok": ok,
        "failed": failed,
        **_spread("ttft", partial(of, "ttft_sent_s")),
        **_spread("tpot", partial(of, "tpot_s")),
        **_spread("itl", partial(of, "itl_s")),
        **_spread("gap", partial(of, "chunk_gap_s")),
        **_spread("latency", partial(of, "latency_sent_s")),
        **_spread("scheduled", partial(of, "latency_s")),
        "requests_rps": ok / report["details"]["duration_s"],
        "tokens_per_s": report["accepted_tokens_per_s"],
        "goodput_rps": report["goodput_rps"],
    }


def _vllm(environments: Path) -> Tool:
    def command(case: Case, url: str, folder: Path) -> list[str]:
        limit = [] if case.most_open is None else ["--max-concurrency", str(case.most_open)]
        return [
            *(str(python_of(environments, "vllm")), "-c", _VLLM, "--backend", "openai-chat"),
            *("--base-url", url, "--endpoint", "/v1/chat/completions", "--model", MODEL),
            *("--tokenizer", str(SHIPPED_MODEL), "--dataset-name", "random"),
            *("--random-input-len", str(PROMPT_TOKENS), "--random-output-len", str(case.tokens)),
            *("--num-prompts", str(case.requests), "--request-rate", f"{RATE:g}"),
            *("--burstiness", "inf", "--goodput", f"ttft:{TTFT_LIMIT_MS:g}"),
            *(f"tpot:{TPOT_LIMIT_MS:g}", "--percentile-metrics", "ttft,tpot,itl,e2el"),
            *("--metric-percentiles", "50,90,99", "--save-result", "--disable-tqdm"),
            *("--result-dir", str(folder), "--result-filename", "vllm.json", *limit),
        ]

    def read(folder: Path) -> Metrics:
        report = json.loads((folder / "vllm.json").read_text(encoding="utf-8"))
        return {
            "ok": report["completed"],
            "failed": report["failed"],
            **_spread("ttft", lambda column: report[f"{column}_ttft_ms"]),
            **_spread("tpot", lambda column: report[f"{column}_tpot_ms"]),
            **_spread("itl", lambda column: report[f"{column}_itl_ms"]),
            **_spread("latency", lambda column: report[f"{column}_e2el_ms"]),
            "requests_rps": report["request_throughput"],
            "tokens_per_s": report["output_throughput"],
            "goodput_rps": report["request_goodput"],
        }

    return Tool("vllm", command, read, {"HF_HUB_OFFLINE": "1"})


def _guidellm(environments: Path) -> Tool:
    def command(case: Case, url: str, folder: Path) -> list[str]:
        slo = {"ttft_ms": TTFT_LIMIT_MS, "tpot_ms": TPOT_LIMIT_MS}
        most = "" if case.most_open is None else f",max_concurrency={case.most_open}"
        program = python_of(environments, "guidellm").with_name("guidellm")
        return [
            *(str(program), "run", "--metrics", json.dumps({"kind": "generative", "slo": slo})),
            *("--backend", f"kind=openai_http,target={url},model={MODEL}"),
            *("--tokenizer", f"kind=huggingface_auto,model={SHIPPED_MODEL}", "--data"),
            f"kind=synthetic_text,prompt_tokens={PROMPT_TOKENS},output_tokens={case.tokens}",
            *("--profile", f"kind=constant,rate={RATE:g}{most}"),
            *("--constraint", f"kind=max_requests,count={case.requests}"),
            *("--output", f"kind=json,path={folder / 'guidellm.json'}", "--disable-console"),
        ]

    def read(folder: Path) -> Metrics:
        report = json.loads((folder / "guidellm.json").read_text(encoding="utf-8"))
        metrics = report["benchmarks"][0]["metrics"]
        totals = metrics["request_totals"]

        def of(scale: float, key: str, column: str) -> float | None:
            found = (metrics[key] or {}).get("successful")
            if found is None or not totals["successful"]:
                return None
            value: float = found["mean"] if column == "mean" else found["percentiles"][column]
            return value * scale

        return {
            "ok": totals["successful"],
            "failed": totals["errored"] + totals["incomplete"],
            **_spread("ttft", partial(of, 1.0, "time_to_first_token_ms")),
            **_spread("tpot", partial(of, 1.0, "time_per_output_token_ms")),
            **_spread("itl", partial(of, 1.0, "inter_token_latency_ms")),
            **_spread("latency", partial(of, 1e3, "request_latency")),
            **_spread("scheduled", partial(of, 1e3, "request_scheduled_latency")),
            "requests_rps": of(1.0, "requests_per_second", "mean"),
            "tokens_per_s": of(1.0, "output_tokens_per_second", "mean"),
            "goodput_rps": of(1.0, "request_goodput", "mean"),
        }

    one = {"HF_HUB_OFFLINE": "1", "GUIDELLM__MAX_WORKER_PROCESSES": "1"}
    return Tool("guidellm", command, read, one)


def _aiperf(environments: Path) -> Tool:
    def command(case: Case, url: str, folder: Path) -> list[str]:
        lengths = ("--isl", str(PROMPT_TOKENS), "--osl", str(case.tokens))
        most = [] if case.most_open is None else ["--concurrency", str(case.most_open)]
        return [
            *aiperf_command(environments, MODEL, url, folder),
            *("--endpoint-type", "chat", *lengths, "--request-rate", f"{RATE:g}"),
            *("--arrival-pattern", "constant", "--request-count", str(case.requests), *most),
        ]

    return Tool("aiperf", command, read_aiperf)


def aiperf_command(environments: Path, model: str, url: str, folder: Path) -> list[str]:
    """Return aiperf's command without its load options.

    aiperf rejects a local tokenizer in offline mode.
    """
    goodput = f"time_to_first_token:{TTFT_LIMIT_MS:g} inter_token_latency:{TPOT_LIMIT_MS:g}"
    return [
        *(str(python_of(environments, "aiperf").with_name("aiperf")), "profile"),
        *("--model", model, "--url", url, "--streaming", "--tokenizer", str(SHIPPED_MODEL)),
        *("--use-server-token-count", "--goodput", goodput, "--ui", "none"),
        *("--no-gpu-telemetry", "--no-server-metrics", "--workers-max", "1"),
        *("--record-processors", "1", "--artifact-dir", str(folder)),
    ]


def read_aiperf(folder: Path) -> Metrics:
    """Return the metrics of `profile_export_aiperf.json`."""
    path = folder / "profile_export_aiperf.json"
    report: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))

    def of(key: str, column: str = "mean") -> float | None:
        found = report.get(key)
        return None if found is None else found.get("avg" if column == "mean" else column)

    return {
        "ok": of("request_count") or 0,
        "failed": of("error_request_count") or 0,
        **_spread("ttft", partial(of, "time_to_first_token")),
        **_spread("itl", partial(of, "inter_token_latency")),
        **_spread("gap", partial(of, "inter_chunk_latency")),
        **_spread("latency", partial(of, "request_latency")),
        **_spread("scheduled", partial(of, "effective_latency")),
        "requests_rps": of("request_throughput"),
        "tokens_per_s": of("output_token_throughput"),
        "goodput_rps": of("goodput"),
    }


def _inference_perf(environments: Path) -> Tool:
    def command(case: Case, url: str, folder: Path) -> list[str]:
        stages = [{"rate": RATE, "duration": round(case.requests / RATE)}]
        limits = {"ttft": TTFT_LIMIT_MS / 1e3, "tpot": TPOT_LIMIT_MS / 1e3}
        most = [] if case.most_open is None else [str(case.most_open)]
        shared, report = "--data.shared_prefix", "--report.request_lifecycle"
        return [
            str(python_of(environments, "inference-perf").with_name("inference-perf")),
            *("--server.type", "vllm", "--server.model_name", MODEL, "--server.base_url", url),
            *("--data.type", "shared_prefix", f"{shared}.num_groups", "1"),
            *(f"{shared}.num_prompts_per_group", str(case.requests)),
            *(f"{shared}.system_prompt_len", "16", f"{shared}.question_len", "48"),
            *(f"{shared}.output_len", str(case.tokens), "--load.type", "constant"),
            *("--load.stages", json.dumps(stages), "--load.num_workers", "1"),
            *(("--load.worker_max_concurrency", *most) if most else ()),
            *("--api.type", "completion", "--api.streaming", "true"),
            *("--tokenizer.pretrained_model_name_or_path", str(SHIPPED_MODEL)),
            *(f"{report}.use_server_output_tokens", "true"),
            *("--report.goodput.constraints", json.dumps(limits)),
            *("--storage.local_storage.path", str(folder)),
        ]

    return Tool("inference-perf", command, _read_inference_perf, {"HF_HUB_OFFLINE": "1"})


def _read_inference_perf(folder: Path) -> Metrics:
    path = folder / "summary_lifecycle_metrics.json"
    report = json.loads(path.read_text(encoding="utf-8"))
    good, failed = report["successes"], report["failures"]
    latency, throughput = good["latency"], good["throughput"]

    def of(key: str, column: str) -> float | None:
        found = latency.get(key)
        return None if found is None else found["median" if column == "p50" else column] * 1e3

    return {
        "ok": good["count"],
        "failed": failed["count"],
        **_spread("ttft", partial(of, "time_to_first_token")),
        **_spread("tpot", partial(of, "time_per_output_token")),
        **_spread("itl", partial(of, "inter_token_latency")),
        **_spread("latency", partial(of, "request_latency")),
        "requests_rps": throughput["requests_per_sec"],
        "tokens_per_s": throughput["output_tokens_per_sec"],
        "goodput_rps": good.get("goodput_metrics", {}).get("request_goodput"),
    }


def tools(environments: Path | None) -> list[Tool]:
    """Return Draftgate's tool and the installed load generators.

    Args:
        environments: folder that `python -m bench.tool_comparison.rivals` creates.
    """
    found = [Tool(DRAFTGATE, draftgate_command, read_draftgate)]
    if environments is not None:
        made = {
            "vllm": _vllm,
            "guidellm": _guidellm,
            "aiperf": _aiperf,
            "inference-perf": _inference_perf,
        }
        there = [name for name in PACKAGES if python_of(environments, name).exists()]
        found += [made[name](environments) for name in there]
    return found
