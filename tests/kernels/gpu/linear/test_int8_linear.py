"""Every shipped configuration of the INT8 linear map."""

from collections.abc import Callable

import pytest
import torch

from clover_local.kernels.gpu.linear.int8_linear import CONFIGS, gate_cases, int8_linear
from clover_local.kernels.gpu.linear.packed_linear import choose
from clover_local.kernels.packed import PackedWeight
from clover_local.kernels.packed_linear import packed_linear_reference

RoundMatrix = Callable[..., PackedWeight]


@pytest.mark.parametrize("number", range(len(CONFIGS)))
def test_configuration_agrees_with_the_reference(
    number: int, round_matrix: RoundMatrix, device: str
) -> None:
    config = CONFIGS[number]
    rows, n = min(config.up_to_rows, 130) - 1, config.block_n + 3
    weight = round_matrix(
        torch.randn(n, 384) * 0.05, bits=8, group_size=128, asymmetric=config.with_minimum
    )
    x = torch.randn(rows, 384).half()
    y = int8_linear(x.to(device), weight.to(device), config=config)
    torch.testing.assert_close(y.cpu(), packed_linear_reference(x, weight), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("rows", [1, 16, 17, 32, 33, 64, 65, 2048])
@pytest.mark.parametrize("features", [512, 2048, 12352, 248320])
@pytest.mark.parametrize("minimum", [False, True])
def test_table_has_a_configuration_for_every_shape(rows: int, features: int, minimum: bool) -> None:
    config = choose(CONFIGS, rows=rows, features=features, minimum=minimum)
    assert rows > 64 or rows <= config.block_m  # a pass reads its weights once
    assert config.with_minimum or not minimum


def test_gate_compiles_every_configuration() -> None:
    tiles = {
        (case.constexprs["BLOCK_N"], case.constexprs["BLOCK_M"], case.constexprs["SPLITS"])
        for case in gate_cases()
    }
    assert tiles == {(config.block_n, config.block_m, config.splits) for config in CONFIGS}
