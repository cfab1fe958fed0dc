"""`draftgate bench mixes`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.simulation.mixes import LARGEST, least_number, main


@given(st.integers(1, 200), st.integers(1, 200))
def test_least_number_is_found(needed: int, first: int) -> None:
    """The result is the least number up to a twentieth, and None only above the largest one."""
    found = least_number(lambda count: count >= needed, first)
    if found is None:
        assert needed > LARGEST * first
    else:
        assert needed <= found <= max(needed, 1.05 * needed)


@pytest.mark.long
def test_mixes_are_compared_with_single_types(tmp_path: Path) -> None:
    """Every plan meets its share, and the mix costs at most as much as any single type.

    A second run keeps the points of the first one, and adds the missing ones.
    """
    pytest.importorskip("scipy")
    trace, out = tmp_path / "trace.jsonl", tmp_path / "mixes.json"
    rows = [{"at_s": 0.5 * n, "prompt_tokens": 200, "output_tokens": 30} for n in range(20)]
    trace.write_text("\n".join(map(json.dumps, rows)))
    given = ["--trace", f"code={trace}", "--tpot-ms", "120", "--share", "0.9"]
    given += ["--requests", "20", "--seconds", "1", "--profiles", "a10g-8b,a100-8b"]
    main([*given, "--rates", "2", "--json", str(out)])
    (first,) = json.loads(out.read_text())["points"]
    alone = [one["cost_per_hour"] for one in first["alone"].values()]
    assert first["plans"]["off"]["cost_per_hour"] <= min(alone)
    assert all(plan["attainment"] >= 0.9 for plan in first["plans"].values())
    main([*given, "--rates", "2,4", "--json", str(out)])
    points = json.loads(out.read_text())["points"]
    assert points[0] == first
    assert [point["rate_rps"] for point in points] == [2.0, 4.0]
    with pytest.raises(SystemExit, match="other settings"):
        main([*given, "--attempts", "1", "--json", str(out)])
