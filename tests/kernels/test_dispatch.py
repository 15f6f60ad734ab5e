"""Which implementation runs."""

import pytest
import torch

from clover_local.kernels import dispatch
from clover_local.kernels.gated_delta_commit import gated_delta_recurrent
from clover_local.kernels.native.build import Missing
from clover_local.kernels.native.launch import kernel_for
from clover_local.kernels.packed import PackedWeight


@pytest.mark.parametrize("rows", [1, 4, 5, 32, 33, 70])
def test_delta_rule_is_the_same_for_any_number_of_rows(rows: int) -> None:
    torch.manual_seed(rows)
    q, k = torch.nn.functional.normalize(torch.randn(2, rows, 2, 12), dim=-1)
    v, state = torch.randn(rows, 4, 20), torch.randn(4, 12, 20)
    g, beta = -torch.rand(rows, 4), torch.rand(rows, 4)
    out = dispatch.gated_delta_commit(q, k, v=v, g=g, beta=beta, state=state)
    expected = gated_delta_recurrent(q, k, v=v, g=g, beta=beta, state=state)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


def test_weights_say_what_multiplies_with_them(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = PackedWeight(
        torch.zeros(3, 16, dtype=torch.int32), torch.ones(3, 2).bfloat16(), None, 4, 64
    )
    kernel = kernel_for(weight)
    if not isinstance(kernel, Missing):
        expected = f"INT4 in groups of 64 by {kernel.target.name}"
        assert dispatch.weight_kernel(weight) == expected
    monkeypatch.setenv("CLOVER_KERNELS", "reference")
    says = dispatch.weight_kernel(weight)
    assert says == "INT4 in groups of 64 by torch (CLOVER_KERNELS=reference)"
    assert dispatch.weight_kernel(torch.zeros(3, 5).bfloat16()) == "bfloat16 by torch"
