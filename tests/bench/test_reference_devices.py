"""Tests of the profiles that are fitted to published measurements."""

from __future__ import annotations

import pytest

from bench.simulation.reference_devices import DEVICES, Sample
from draftgate.backends.sim.profile import load_profile


@pytest.mark.parametrize(
    ("device", "sample"),
    [
        # DistServe: 18.10 + 0.1019 n + 7.12e-6 n^2 ms, and 19.93 + 0.000627 kv + 0.0385 batch ms.
        ("opt-13b-a100-tp1", Sample(72.15e-3, tokens=512)),
        ("opt-13b-a100-tp1", Sample(37.21e-3, batch=32, context=800)),
        # DistServe: 14.74 + 0.0686 n + 2.45e-6 n^2 ms, and 13.29 + 0.000341 kv + 0.063 batch ms.
        ("opt-13b-a100-tp2", Sample(87.53e-3, tokens=1024)),
        ("opt-13b-a100-tp2", Sample(24.04e-3, batch=32, context=800)),
        # splitwise-sim: medians of five runs.
        ("llama-2-70b-a100-tp8", Sample(154.46e-3, tokens=1024)),
        ("llama-2-70b-a100-tp8", Sample(661.22e-3, tokens=4096)),
        ("llama-2-70b-a100-tp8", Sample(71.61e-3, batch=64, context=576)),
        ("llama-2-70b-h100-tp8", Sample(77.91e-3, tokens=1024)),
        ("llama-2-70b-h100-tp8", Sample(29.76e-3, batch=1, context=576)),
        ("llama-2-70b-h100-tp8", Sample(50.16e-3, batch=64, context=576)),
    ],
)
def test_profile_predicts_the_published_time(device: str, sample: Sample) -> None:
    """Prompts and decode batches take the published time within 6%."""
    cost = load_profile(str(DEVICES / f"{device}.json")).cost
    assert sample.predicted_s(cost) == pytest.approx(sample.seconds, rel=0.06)


def test_h100_decodes_cost_more_than_a100_decodes_by_price() -> None:
    """Per dollar, the A100 decodes 64 sequences 1.3 to 1.6 times as fast, as in Splitwise."""
    profiles = [
        load_profile(str(DEVICES / f"llama-2-70b-{one}-tp8.json")) for one in ("a100", "h100")
    ]
    seconds = [Sample(1.0, batch=64, context=576).predicted_s(one.cost) for one in profiles]
    prices = [one.price_per_hour_usd or 0.0 for one in profiles]
    assert 1.3 < (seconds[1] * prices[1]) / (seconds[0] * prices[0]) < 1.6
