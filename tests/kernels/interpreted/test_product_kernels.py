"""The products with quantised weights in the interpreter, compared with their references."""

from __future__ import annotations

import pytest
import torch

from draftgate.backends.engine.kernels import fp8_product_ref, int4_product_ref
from draftgate.backends.engine.kernels.fp8_product import fp8_product, fp8_rows
from draftgate.backends.engine.kernels.int4_product import int4_product
from draftgate.backends.engine.quantisation import e4m3
from tests.kernels.layer_cases import normal
from tests.kernels.product_cases import SHAPES, Shape, fp8_case, int4_case

CLOSE = {"rtol": 1e-5, "atol": 1e-5}
EXACT = Shape(70, 40, 96, 32)
SHAPE = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())


@pytest.mark.parametrize("scale", [None, 0.02])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("group", [16, 40, 128, 1000])
def test_rows_have_the_codes_of_torch(group: int, dtype: torch.dtype, scale: float | None) -> None:
    """Codes and scales have the bits of the reference, also for zeros and numbers below 2^-6."""
    x = normal((5, 1000), 1, dtype)
    x[1] = 0
    x[2] *= 10.0 ** torch.linspace(-7, 3, 1000)
    found, expected = fp8_rows(x, group, scale), e4m3.fp8_rows(x, group, scale)
    assert torch.equal(found[0].view(torch.uint8), expected[0].view(torch.uint8))
    assert torch.equal(found[1], expected[1])


def test_middles_are_rounded_to_even_codes() -> None:
    """Every middle of two codes, and the numbers beside it, are rounded as torch does."""
    codes = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    middles = (codes[1:] + codes[:-1]) / 2
    below, above = (torch.nextafter(middles, middles * 0 + end) for end in (0.0, 500.0))
    x = torch.cat([middles, below, above, codes, -middles, -codes])[None]
    found, expected = fp8_rows(x, 1000, 1.0)[0], x.to(torch.float8_e4m3fn)
    assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))


@SHAPE
@pytest.mark.parametrize("exact", [False, True])
def test_fp8_product_equals_the_reference(shape: Shape, exact: bool) -> None:
    """Products in FP8 equal those of torch for blocks and for scales per output."""
    case = fp8_case(shape)
    found, expected = fp8_product(*case, exact=exact), fp8_product_ref.fp8_product(*case)
    torch.testing.assert_close(found, expected, **CLOSE)


@SHAPE
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_int4_product_equals_the_reference(shape: Shape, dtype: torch.dtype) -> None:
    """Products with 4 bits equal those of torch, in float32 and in the dtype of the rows."""
    case = int4_case(shape, dtype=dtype)
    wide = case._replace(dtype=torch.float32)
    found, expected = int4_product(*wide), int4_product_ref.int4_product(*wide)
    torch.testing.assert_close(found, expected, **CLOSE)
    # The interpreter rounds towards zero.
    torch.testing.assert_close(int4_product(*case), expected.to(dtype), rtol=2**-7, atol=1e-5)


def test_rows_of_exact_products_do_not_depend_on_each_other() -> None:
    """With `exact`, a row has the same bits alone and among any number of rows."""
    for case, product in ((fp8_case(EXACT), fp8_product), (int4_case(EXACT), int4_product)):
        together = product(*case, exact=True)
        for first, last in ((0, 1), (69, 70), (3, 20), (0, 65)):
            alone = product(*case.rows(first, last), exact=True)
            assert torch.equal(alone, together[first:last])


def test_unsupported_arguments_are_rejected() -> None:
    """The kernels raise ValueError for tensors that they cannot read."""
    fp8, int4 = fp8_case(EXACT), int4_case(EXACT)
    with pytest.raises(ValueError, match="contiguous rows"):
        fp8_rows(normal((4, 8), 1).T, 4)
    with pytest.raises(ValueError, match="do not fit 70 rows of 96 inputs"):
        fp8_product(*fp8._replace(weight=fp8.weight[:, :64]))
    with pytest.raises(ValueError, match="do not have 3 groups of 64"):
        fp8_product(*fp8._replace(group=64))
    with pytest.raises(ValueError, match="contiguous tensors"):
        fp8_product(*fp8._replace(scales=fp8.scales.T.contiguous().T))
    with pytest.raises(ValueError, match="do not fit 96 inputs"):
        int4_product(*int4._replace(packed=int4.packed[:, 1:]))
    with pytest.raises(ValueError, match="do not have 3 groups of 64"):
        int4_product(*int4._replace(group=64))
    with pytest.raises(ValueError, match="96 inputs in groups of 33 do not fill words"):
        int4_product(*int4._replace(group=33))
    with pytest.raises(ValueError, match="contiguous tensors"):
        int4_product(*int4._replace(scales=int4.scales.T.contiguous().T))
