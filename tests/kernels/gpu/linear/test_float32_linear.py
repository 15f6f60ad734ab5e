"""The router's product against the plain one."""

import pytest
import torch

from clover_local.kernels.gpu.linear.float32_linear import float32_linear
from clover_local.kernels.linear import linear

SIZES = [(1, 257, 64), (7, 9, 2048), (16, 8, 100), (17, 33, 129), (33, 257, 256), (64, 1, 16)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", SIZES, ids=lambda s: "M{}-N{}-K{}".format(*s))
def test_product_is_that_of_float32(
    size: tuple[int, int, int], dtype: torch.dtype, device: str
) -> None:
    rows, features, columns = size
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, columns, generator=generator).to(device, dtype)
    weight = torch.randn(features, columns, generator=generator).to(device)
    y = float32_linear(x, weight)
    assert y.dtype == torch.float32
    torch.testing.assert_close(y, linear(x.float(), weight), rtol=1e-5, atol=1e-4)


def test_a_row_has_the_same_bits_in_any_company(device: str) -> None:
    x, weight = torch.randn(40, 64, device=device), torch.randn(5, 64, device=device)
    together = float32_linear(x, weight)
    for row in (0, 17, 39):
        assert torch.equal(float32_linear(x[row : row + 1], weight)[0], together[row])


@pytest.mark.parametrize(
    ("x", "weight", "words"),
    [
        (torch.zeros(2, 16), torch.zeros(3, 8), r"\[2, 16\].*\[3, 8\]"),
        (torch.zeros(65, 16), torch.zeros(3, 16), "65 rows.*64"),
        (torch.zeros(2, 16), torch.zeros(3, 16).half(), "float16.*float32"),
        (torch.zeros(2, 32)[:, ::2], torch.zeros(3, 16), "strides"),
        (torch.zeros(2, 16, dtype=torch.int32), torch.zeros(3, 16), "int32"),
    ],
    ids=["columns", "rows", "dtype", "strides", "integers"],
)
def test_what_does_not_fit_is_refused(x: torch.Tensor, weight: torch.Tensor, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        float32_linear(x, weight)
