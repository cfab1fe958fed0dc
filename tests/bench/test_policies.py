"""Tests of `draftgate bench policies`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.simulation import policies
from draftgate.lab.simulate.experiment import ExperimentOutcome


def outcome(policy: str, latencies_s: list[float]) -> ExperimentOutcome:
    return ExperimentOutcome(policy, samples={"latency_s.mean": list(latencies_s)})


def test_auto_is_compared_with_the_best_fixed_length() -> None:
    """The study pairs differences by seed.

    A mean difference within 2%, or an uncertain difference, counts as equal.
    """
    others = {name: outcome(name, [5.0, 6.0, 7.0]) for name in policies.POLICIES}
    others |= {"fixed:2": outcome("fixed:2", [4.0, 5.0, 6.0]), "off": outcome("off", [8, 9, 10])}
    others |= {"oracle": outcome("oracle", [3.0, 4.0, 5.0])}
    close = policies.findings(others | {"auto": outcome("auto", [4.09, 5.09, 6.09])})
    assert (close["best_fixed"], close["at_envelope"], close["at_off"]) == ("fixed:2", True, True)
    assert close["to_envelope"]["relative"] == pytest.approx(0.018)
    assert close["share_of_oracle"] == pytest.approx(3.91 / 5)
    worse = policies.findings(others | {"auto": outcome("auto", [4.11, 5.11, 6.12])})
    assert not worse["at_envelope"]
    unsure = policies.findings(others | {"auto": outcome("auto", [3.0, 5.5, 7.5])})
    assert unsure["at_envelope"]


def test_shares_of_the_oracle_are_paired_by_seed() -> None:
    """A share is the mean over seeds of a policy's gain over `off` in units of the oracle's."""
    outcomes = {
        "off": outcome("off", [10.0, 20.0, 30.0]),
        "oracle": outcome("oracle", [6.0, 10.0, 20.0]),
        "auto": outcome("auto", [7.0, 13.0, 22.0]),
    }
    shares = policies.shares_of_oracle(outcomes)
    assert shares.keys() == {"auto"}
    assert shares["auto"]["mean"] == pytest.approx((0.75 + 0.7 + 0.8) / 3)
    low, high = shares["auto"]["interval"]
    assert (low < 0.7, high > 0.8) == (True, True)


@pytest.mark.long
def test_the_policies_command_attributes_the_loss_of_auto(tmp_path: Path) -> None:
    """With `--attribute`, variants of `auto` take the place of the baselines."""
    out = tmp_path / "out.json"
    words = ["--attribute", "--tuning", "--workloads", "chat", "--requests", "0.05"]
    policies.main([*words, "--shares", "1.2", "--seeds", "3", "--json", str(out)])
    (cell,) = json.loads(out.read_bytes())["cells"]
    assert set(cell["shares"]) == {"auto", *policies.INFORMED}
    assert cell["shares"]["auto+acceptance"]["mean"] > cell["shares"]["auto"]["mean"]


@pytest.mark.long
def test_the_policies_command_reports_every_policy_at_every_rate(tmp_path: Path) -> None:
    """The JSON file has all policies for each workload and rate."""
    out = tmp_path / "out.json"
    words = ["--workloads", "code", "--requests", "0.02", "--seeds", "2", "--shares", "0.3,1.2"]
    policies.main([*words, "--json", str(out)])
    cells = json.loads(out.read_bytes())["cells"]
    assert [(cell["workload"], cell["share"]) for cell in cells] == [("code", 0.3), ("code", 1.2)]
    assert cells[1]["rate_rps"] == pytest.approx(4 * cells[0]["rate_rps"])
    named = {"threshold_by_batch:batch_tiers.json", "oracle", "auto", "off", "fixed:8"}
    assert all(named <= cell["policies"].keys() for cell in cells)
    assert str(tmp_path) not in out.read_text()
