"""Chains of a draft model on the Triton kernels, compared with chains that the host extends."""

from __future__ import annotations

import pytest

from tests.engine.tiny_drafter import COMMON, TinyDrafter, in_graphs, on_the_device
from tests.engine.tiny_model import VOCAB, tiny_config, tiny_weights, torch_decoder, triton_decoder
from tests.kernels.recorded_graphs import recorded_graphs

pytestmark = [
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0"),
    pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered"),
]


@pytest.mark.parametrize("vocab", [COMMON, VOCAB + 3])
def test_device_draws_the_chains_of_the_host(vocab: int) -> None:
    """Chains of unequal lengths have the tokens and the evidence of chains that the host extends,
    also if the vocabularies have different padding."""
    config = tiny_config(num_layers=1, windows=(24,), vocab_size=vocab)
    weights = tiny_weights(config)
    found = TinyDrafter(triton_decoder(config, weights), on_the_device).run()
    assert found == TinyDrafter(triton_decoder(config, weights)).run()
    reference = TinyDrafter(torch_decoder(config, weights)).run()
    assert [draft.token_ids for draft in found] == [draft.token_ids for draft in reference]
    assert len({len(draft) for draft in found}) > 2
    assert all(draft.evidence for draft in found)


def test_captured_passes_draw_the_chains_of_the_host() -> None:
    """A graph of one pass, replayed for each further draft, gives the chains of the host."""
    config = tiny_config(num_layers=1, windows=(None,))
    weights = tiny_weights(config)
    with recorded_graphs():
        drafter = TinyDrafter(triton_decoder(config, weights), in_graphs)
        assert drafter.run() == TinyDrafter(triton_decoder(config, weights)).run()
    assert drafter.chains is not None
    graphs = drafter.chains._next._graphs.values()
    assert sum(graph.replays for graph, _ in graphs) == drafter.further_passes > 0
