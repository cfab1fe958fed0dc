"""`draftgate bench mixes`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.simulation.mixes import main


@pytest.mark.long
def test_mixes_are_compared_with_single_types(tmp_path: Path) -> None:
    """Every plan meets its share, and the mix costs at most as much as the best single type."""
    pytest.importorskip("scipy")
    trace, out = tmp_path / "trace.jsonl", tmp_path / "mixes.json"
    rows = [{"at_s": 0.5 * n, "prompt_tokens": 200, "output_tokens": 30} for n in range(20)]
    trace.write_text("\n".join(map(json.dumps, rows)))
    given = ["--trace", f"code={trace}", "--rates", "2", "--tpot-ms", "120", "--share", "0.9"]
    given += ["--requests", "20", "--seconds", "1"]
    main([*given, "--profiles", "a10g-8b,a100-8b", "--json", str(out)])
    plans = json.loads(out.read_text())["plans"]
    assert [plan["speculation"] for plan in plans] == ["off", "auto"]
    for plan in plans:
        assert plan["mix"]["attainment"] >= 0.9
        single = plan["best_single"]
        assert single["attainment"] >= 0.9
        assert plan["mix"]["cost_per_hour"] <= single["cost_per_hour"]
