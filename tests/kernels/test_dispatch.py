"""Which implementation runs."""

import pytest
import torch

from clover_local.kernels import dispatch
from clover_local.kernels.native.build import Missing
from clover_local.kernels.native.launch import kernel_for
from clover_local.kernels.packed import PackedWeight


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
