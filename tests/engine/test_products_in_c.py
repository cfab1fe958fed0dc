"""Float32 products of bfloat16 matrices in C, with and without matrix tiles."""

from __future__ import annotations

import subprocess
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from draftgate.backends.engine.operators import products
from draftgate.backends.engine.operators.compiler import compiler_version

pytestmark = pytest.mark.skipif(compiler_version() is None, reason="needs gcc")

OUTPUTS, WIDTH = 96, 160
ROWS = (1, 4, 15, 16, 17, 32, 33, 64, 100)


@pytest.fixture(params=[False, True], ids=["vectors", "tiles"])
def in_tiles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Multiply in tiles or without them."""
    if request.param and not products.has_tiles():
        pytest.skip("this machine has no matrix tiles")
    monkeypatch.setattr(products, "has_tiles", lambda: request.param)


def matrices(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    x = torch.randn(rows, WIDTH, generator=random).bfloat16()
    return x, torch.randn(OUTPUTS, WIDTH, generator=random).bfloat16()


@pytest.mark.usefixtures("in_tiles")
@pytest.mark.parametrize("rows", ROWS)
def test_products_have_the_precision_of_float32(rows: int) -> None:
    """Products of bfloat16 numbers differ from exact sums by rounding errors of float32."""
    x, weight = matrices(rows)
    exact = x.double() @ weight.double().T
    bound = 2e-6 * (x.double().abs() @ weight.double().abs().T)
    assert ((products.multiply(x, weight) - exact).abs() <= bound).all()


@pytest.mark.usefixtures("in_tiles")
@pytest.mark.parametrize("rows", ROWS)
def test_bits_of_a_row_do_not_depend_on_other_rows(rows: int) -> None:
    """A row has the same bits alone, in any place and among any number of rows."""
    x, weight = matrices(max(ROWS))
    alone = [products.multiply(row[None], weight)[0] for row in x]
    for first in range(0, len(x) - rows + 1, 7):
        together = products.multiply(x[first : first + rows], weight)
        assert torch.equal(together, torch.stack(alone[first : first + rows]))


@pytest.mark.usefixtures("in_tiles")
def test_bits_do_not_depend_on_the_number_of_threads() -> None:
    """One thread and two threads compute the same bits."""
    x, weight = matrices(33)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = products.multiply(x, weight)
        torch.set_num_threads(2)
        assert torch.equal(one, products.multiply(x, weight))
    finally:
        torch.set_num_threads(threads)


def test_tiles_are_off_where_a_process_that_uses_them_is_killed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A child process tries the tiles first, so that a forbidden instruction kills no server."""

    def killed(*_: Any, **__: Any) -> SimpleNamespace:
        return SimpleNamespace(returncode=-4)

    monkeypatch.setattr(products, "USES_AMX", True)
    library = SimpleNamespace(multiply_in_tiles=None, request_tiles=pytest.fail, _name="")
    monkeypatch.setattr(products, "_library", lambda: library)
    monkeypatch.setattr(subprocess, "run", killed)
    assert products.has_tiles.__wrapped__() is False
