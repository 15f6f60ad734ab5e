"""Products with plain and with blocked weights."""

import pytest
import torch

from clover_local.kernels.linear import BLOCKED_ELEMENTS, blocked_weight, linear

LARGE = (520, 768)
needs_onednn = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(),  # type: ignore[no-untyped-call]
    reason="this torch has no oneDNN",
)


@pytest.mark.parametrize("rows", [0, 1, 2, 7, 33])
@pytest.mark.parametrize("shape", [(33, 17), LARGE], ids=["small", "large"])
def test_product_agrees_with_float64(rows: int, shape: tuple[int, int]) -> None:
    torch.manual_seed(rows)
    x, weight = torch.randn(rows, shape[1]), torch.randn(shape)
    expected = (x.double() @ weight.double().T).float()
    torch.testing.assert_close(linear(x, blocked_weight(weight)), expected, rtol=1e-4, atol=2e-4)


def test_rows_may_be_strided() -> None:
    torch.manual_seed(1)
    x, weight = torch.randn(5, 2 * LARGE[1])[:, ::2], torch.randn(LARGE)
    torch.testing.assert_close(
        linear(x, blocked_weight(weight)), x @ weight.T, rtol=1e-4, atol=2e-4
    )


@needs_onednn
def test_only_large_float32_weights_are_blocked() -> None:
    large = torch.randn(LARGE)
    small = torch.randn(3, BLOCKED_ELEMENTS // 4)
    blocked = blocked_weight(large)
    assert isinstance(blocked, torch.Tensor)
    assert blocked.is_mkldnn
    assert blocked.shape == large.shape
    assert blocked_weight(small) is small
    half = large.bfloat16()
    assert blocked_weight(half) is half


@needs_onednn
@pytest.mark.parametrize("rows", [2, 3, 7, 32, 33, 100])
def test_row_has_the_same_bits_in_any_company(rows: int) -> None:
    torch.manual_seed(2)
    x, weight = torch.randn(150, LARGE[1]), blocked_weight(torch.randn(LARGE))
    assert torch.equal(linear(x[17 : 17 + rows], weight), linear(x, weight)[17 : 17 + rows])
