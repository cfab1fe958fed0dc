"""The first run on a GPU: its stages, its resumption and its page."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

pytest.importorskip("torch")

from bench.engine.bench_engine import BenchEngine
from bench.engine.cases import Case
from bench.gpu import checks, first_run, stage
from bench.gpu.page import page_body
from bench.gpu.setting import Setting
from bench.gpu.steps import against_estimates

RATES = {"bytes_per_s": 1e12, "flops_per_s": 1e14}
STEP = {
    "name": "decode", "batch": 64, "tokens": 1, "context_tokens": 1024, "ms": 7.6,
    "share_of_bandwidth": 0.7, "share_of_matrix_rate": 0.1, "over_roofline": 1.4,
}  # fmt: skip


def rehearse(out: Path, *arguments: str) -> None:
    first_run.main(
        ["--device", "cpu", "--tiny", "--out", str(out), "--wheels", str(out / "none"), *arguments]
    )


def results(out: Path) -> dict[str, str]:
    found = {path.stem: json.loads(path.read_text()) for path in out.glob("*.json")}
    return {name: result["status"] for name, result in found.items() if "status" in result}


@pytest.fixture
def stages(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replace the processes of stages, and return the names of those that ran."""
    ran: list[str] = []

    def run_stage(each, args, environment):
        ran.append(each.name)
        failed = each.name == "engine" and ran.count("engine") == 1
        result = {"status": "failed" if failed else "passed", "seconds": 0.0}
        (args.out / f"{each.name}.json").write_text(json.dumps(result))
        return result

    monkeypatch.setattr(first_run, "run_stage", run_stage)
    monkeypatch.setattr(first_run, "write_page", lambda out, environment: None)
    return ran


def test_every_stage_has_a_function_and_ends_in_ten_minutes() -> None:
    """Each listed stage can be imported, and its limit is below 600 s."""
    assert {each.name for each in first_run.STAGES} == stage.MODULES.keys()
    assert all(callable(stage.stage_function(each.name)) for each in first_run.STAGES)
    assert max(each.limit_s for each in first_run.STAGES) < 600


def test_second_run_continues_with_the_stages_that_failed(
    tmp_path: Path, stages: list[str]
) -> None:
    """A failure stops no later stage, and the next run repeats only what failed."""
    with pytest.raises(SystemExit, match="failed: engine"):
        rehearse(tmp_path)
    assert stages == [each.name for each in first_run.STAGES]
    stages.clear()
    stages.append("engine")  # its first failure
    rehearse(tmp_path)
    assert stages == ["engine", "engine"]
    rehearse(tmp_path, "--only", "rates", "trees")
    assert stages[2:] == ["rates", "trees"]
    rehearse(tmp_path, "--from", "shipped")
    assert stages[4:] == ["shipped", "exact", "transformers"]


def test_stage_that_hangs_is_ended(tmp_path: Path) -> None:
    """A stage that exceeds its limit is ended, and its log is part of the result."""
    started_s = time.monotonic()
    with pytest.raises(SystemExit, match="failed: rates"):
        rehearse(tmp_path, "--only", "rates", "--limit-s", "0")
    assert results(tmp_path) == {"rates": "timeout"}
    assert time.monotonic() - started_s < 60


@pytest.mark.long
def test_rehearsal_measures_steps_and_writes_the_page(tmp_path: Path) -> None:
    """On a CPU, stages measure tiny models, skip what needs a GPU, and draw the roofline."""
    chosen = (
        "rates", "steps-8b", "steps-8b-fp8", "steps-8b-int4", "steps-30b-a3b", "profile", "trees",
        "drafts", "idle",
    )  # fmt: skip
    rehearse(tmp_path, "--only", *chosen)
    found = results(tmp_path)
    assert found.pop("idle") == "skipped"
    assert set(found.values()) == {"passed"}
    assert "roofline" in (tmp_path / "index.html").read_text(encoding="utf-8")


def test_stage_that_crashes_keeps_its_cases(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The times of the steps before a crash are in the result of the stage that failed."""
    step_s = BenchEngine.step_s

    def crash(engine: BenchEngine, case: Case) -> float:
        if case.batch > 1:
            raise RuntimeError("illegal memory access")
        return step_s(engine, case)

    monkeypatch.setattr(BenchEngine, "step_s", crash)
    with pytest.raises(RuntimeError, match="illegal memory"):
        stage.main(["steps-8b-int4", str(tmp_path), "--device", "cpu", "--tiny"])
    found = first_run._result(tmp_path / "steps-8b-int4.json", 1)
    assert found["status"] == "failed"
    assert [(row["batch"], row["runs"]) for row in found["steps"]] == [(1, 1)]


def test_page_has_a_roofline_and_escapes_logs() -> None:
    """The page shows measured steps, and the log of a failed stage as text."""
    found: dict[str, dict] = {each.name: {} for each in first_run.STAGES}
    found["rates"] = {"status": "passed", "rates": RATES}
    found["steps-8b"] = {"status": "passed", "steps": [STEP, {**STEP, "failed": "no memory"}]}
    found["steps-30b-a3b"] = {"status": "passed", "steps": [{**STEP, "ms": 5.2}]}
    found["engine"] = {"status": "failed", "log": ["<script>"]}
    page = "\n".join(page_body(found))
    assert "64 x 1 tokens after 1024: 7.6 ms" in page
    assert "64 x 1 tokens after 1024: 5.2 ms" in page
    assert "<script>" not in page


def test_steps_are_compared_with_their_estimates() -> None:
    """Only steps with an estimate are compared, and 30% is the tolerance."""
    other = {**STEP, "context_tokens": 2048}
    slow = {**STEP, "ms": 11.4}
    rows = against_estimates([STEP, other, slow])
    assert [(row["ratio"], row["as_expected"]) for row in rows] == [(1.0, True), (1.5, False)]


def test_interpreted_files_run_as_in_the_tests(tmp_path: Path) -> None:
    """A rehearsal gives the interpreter the same variables as the tests of the kernels."""
    file = tmp_path / "test_variables.py"
    file.write_text(
        f"import os\n\ndef test_variables():\n    assert {checks.INTERPRETED}.items() <= "
        "os.environ.items()\n"
    )
    assert checks.run_file(file, interpreted=True)["ok"]
    assert not checks.run_file(file)["ok"]


def test_test_files_run_without_plugins_and_report_failures(tmp_path: Path) -> None:
    """A file without asyncio runs although the plugins' options are unknown, and failures count."""
    good, bad = tmp_path / "test_good.py", tmp_path / "test_bad.py"
    good.write_text("def test_passes():\n    pass\n")
    bad.write_text("def test_passes():\n    pass\n\ndef test_fails():\n    assert False\n")
    assert checks.run_file(good)["ok"]
    found = checks.run_files(Setting("kernels", tmp_path, "cuda", tiny=True), [good, bad])
    assert (found["status"], found["files"][1]["failed"]) == ("failed", 1)
    assert any("assert False" in line for line in found["files"][1]["output"])
    slow = checks.run_file(good, limit_s=0.0)
    assert (slow["ok"], slow["reason"]) == (False, "timeout")
