"""The products with quantised weights on a GPU: references, bits of a row, and capture."""

from __future__ import annotations

import os

import pytest
import torch

pytest.importorskip("triton")

from draftgate.backends.engine.kernels import fp8_product_ref, int4_product_ref
from draftgate.backends.engine.kernels.fp8_product import fp8_product, fp8_rows
from draftgate.backends.engine.kernels.int4_product import int4_product
from draftgate.backends.engine.quantisation import e4m3
from tests.kernels.layer_cases import normal
from tests.kernels.product_cases import SHAPES, Shape, fp8_case, int4_case

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET", "0") == "1",
        reason="needs a CUDA device and compiled kernels",
    ),
]

LARGE = {
    "decode": Shape(8, 1536, 4096, 128),
    "verify": Shape(40, 1536, 4096, 128, biased=True),
    "prefill": Shape(700, 1536, 4096, 128),
    "a scale per output, long": Shape(300, 512, 4096, 4096),
}
EVERY = SHAPES | LARGE
SHAPE = pytest.mark.parametrize("shape", EVERY.values(), ids=EVERY.keys())

# Tensor cores add the products of a step with fewer bits than float32.
FP8_CLOSE = {"rtol": 2e-3, "atol": 2e-3}


@pytest.mark.parametrize("group", [16, 40, 128, 4096])
def test_rows_have_the_codes_of_torch(group: int) -> None:
    """Codes and scales have the bits of the reference."""
    x = normal((70, 4096), 1, torch.bfloat16, "cuda")
    found, expected = fp8_rows(x, group), e4m3.fp8_rows(x, group)
    assert torch.equal(found[0].view(torch.uint8), expected[0].view(torch.uint8))
    assert torch.equal(found[1], expected[1])


@SHAPE
@pytest.mark.parametrize("exact", [False, True])
def test_fp8_product_equals_the_reference(shape: Shape, exact: bool) -> None:
    """Products in FP8 equal those of torch for blocks and for scales per output."""
    case = fp8_case(shape, "cuda")
    found, expected = fp8_product(*case, exact=exact), fp8_product_ref.fp8_product(*case)
    torch.testing.assert_close(found, expected, **FP8_CLOSE)


@SHAPE
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize(
    ("dtype", "close"), [(torch.float32, 1e-4), (torch.bfloat16, 2e-2), (torch.float16, 2e-3)]
)
def test_int4_product_equals_the_reference(
    dtype: torch.dtype, close: float, shape: Shape, exact: bool
) -> None:
    """Products with 4 bits equal those of torch."""
    case = int4_case(shape, "cuda", dtype)
    found, expected = int4_product(*case, exact=exact), int4_product_ref.int4_product(*case)
    torch.testing.assert_close(found, expected, rtol=close, atol=close)


@pytest.mark.parametrize("shape", LARGE.values(), ids=LARGE.keys())
def test_rows_of_exact_products_do_not_depend_on_each_other(shape: Shape) -> None:
    """With `exact`, a row has the same bits alone and among any number of rows."""
    for case, product in (
        (fp8_case(shape, "cuda", torch.bfloat16), fp8_product),
        (int4_case(shape, "cuda", torch.bfloat16), int4_product),
    ):
        together = product(*case, exact=True)
        for first in (0, shape.rows // 2, shape.rows - 1):
            for last in {first + 1, min(first + 65, shape.rows)}:
                alone = product(*case.rows(first, last), exact=True)
                assert torch.equal(alone, together[first:last])


def test_products_can_be_captured() -> None:
    """A graph gives the results of direct calls for other rows."""
    case = int4_case(LARGE["decode"], "cuda", torch.bfloat16)
    fp8 = fp8_case(LARGE["decode"], "cuda", torch.bfloat16)

    def both() -> tuple[torch.Tensor, torch.Tensor]:
        rounded = fp8._replace(codes=(rows := fp8_rows(case.x, 128))[0], row_scales=rows[1])
        return int4_product(*case), fp8_product(*rounded)

    both()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = both()
    for _ in range(2):
        case.x.neg_().add_(0.5)
        graph.replay()
        for found, expected in zip(captured, both(), strict=True):
            assert torch.equal(found, expected)
