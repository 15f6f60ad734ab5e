"""INT4 and INT8 linear maps, in every shipped configuration, against dequantizing first."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from clover_local.kernels.gpu.linear.packed_linear import (
    CONFIGS,
    LinearConfig,
    SplitWorkspace,
    choose,
    gate_cases,
    packed_linear,
    pieces_of,
    split_workspace,
)
from clover_local.kernels.packed import PackedWeight
from clover_local.kernels.packed_linear import packed_linear_reference

RoundMatrix = Callable[..., PackedWeight]
TOLERANCES = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}
ONE = LinearConfig(64, 4096, 64, 16, piece=128, block_k=128, splits=1, num_warps=4, num_stages=3)
SPLIT = replace(ONE, splits=3)


def run(
    x: torch.Tensor,
    weight: PackedWeight,
    *,
    config: LinearConfig = ONE,
    workspace: SplitWorkspace | None = None,
) -> torch.Tensor:
    return packed_linear(x, weight, config=config, workspace=workspace)


@pytest.mark.parametrize("asymmetric", [False, True], ids=["symmetric", "minima"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("bits", "rows", "n", "k", "group_size"),
    [
        (4, 17, 70, 384, 128),
        (4, 7, 33, 192, 64),
        (4, 9, 65, 96, 32),
        (8, 33, 40, 256, 128),
        (8, 1, 70, 128, 64),
        (8, 16, 33, 96, 32),
        (8, 3, 20, 96, 96),
    ],
    ids=lambda value: str(value),
)
def test_it_is_the_product_with_the_dequantized_weight(
    bits: int,
    rows: int,
    n: int,
    k: int,
    group_size: int,
    dtype: torch.dtype,
    asymmetric: bool,
    round_matrix: RoundMatrix,
    device: str,
) -> None:
    torch.manual_seed(rows)
    weight = round_matrix(
        torch.randn(n, k) * k**-0.5, bits=bits, group_size=group_size, asymmetric=asymmetric
    )
    x = torch.randn(rows, k).to(dtype)
    y = run(x.to(device), weight.to(device), config=SPLIT if k > 128 else ONE)
    assert y.dtype == dtype
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(
        y.cpu(), packed_linear_reference(x, weight), rtol=tolerance, atol=tolerance
    )


@pytest.mark.parametrize("bits", [4, 8])
def test_every_integer_has_its_value(bits: int, round_matrix: RoundMatrix, device: str) -> None:
    steps = torch.arange(-(1 << (bits - 1)), 1 << (bits - 1)).float()
    weight = round_matrix(steps.repeat(32 // bits, 1).T.contiguous().view(-1, 32), bits=bits)
    exact = replace(weight, scale=torch.ones_like(weight.scale))
    for dtype in (torch.float16, torch.float32, torch.bfloat16):
        y = run(torch.eye(32, dtype=dtype, device=device), exact.to(device))
        assert torch.equal(y.float().cpu(), exact.dequantize().T)


def test_scales_are_not_rounded_to_the_rows_dtype(round_matrix: RoundMatrix, device: str) -> None:
    weight = round_matrix(torch.ones(8, 128), group_size=128)
    fine = replace(weight, scale=torch.full((8, 1), 1 / 3, dtype=torch.float32))
    x = torch.zeros(1, 128, dtype=torch.float32)
    x[0, 5] = 1
    expected = packed_linear_reference(x, fine)
    torch.testing.assert_close(run(x.to(device), fine.to(device)).cpu(), expected, rtol=0, atol=0)
    half = run(x.to(device).half(), fine.to(device))
    torch.testing.assert_close(half.cpu(), expected.half(), rtol=0, atol=0)


def test_a_workspace_serves_launches_in_turn(round_matrix: RoundMatrix, device: str) -> None:
    workspace = split_workspace([SPLIT], rows=40, features=200, device=device)
    for rows, n in ((40, 200), (1, 70), (33, 130)):
        weight = round_matrix(torch.randn(n, 384) * 0.05, group_size=128)
        x = torch.randn(rows, 384)
        workspace.parts.fill_(torch.nan)
        y = run(x.to(device), weight.to(device), config=SPLIT, workspace=workspace)
        torch.testing.assert_close(
            y.cpu(), packed_linear_reference(x, weight), rtol=1e-5, atol=1e-5
        )
        assert not workspace.arrived.any()


def test_bits_of_a_row_do_not_depend_on_the_rows_beside_it(
    round_matrix: RoundMatrix, device: str
) -> None:
    weight = round_matrix(torch.randn(70, 384), group_size=128).to(device)
    x = torch.randn(19, 384, device=device)
    every = run(x, weight, config=SPLIT)
    assert torch.equal(run(x[5:7].clone(), weight, config=SPLIT), every[5:7])


def test_no_rows_make_no_rows(round_matrix: RoundMatrix, device: str) -> None:
    weight = round_matrix(torch.randn(70, 128), group_size=128).to(device)
    assert run(torch.empty(0, 128, device=device), weight).shape == (0, 70)


@pytest.mark.parametrize(
    ("group_size", "columns", "expected"),
    [
        (128, 384, (128, 1)),
        (2048, 2048, (128, 1)),
        (64, 192, (64, 1)),
        (32, 96, (32, 1)),
        (32, 256, (32, 4)),
        (96, 384, (32, 4)),
    ],
)
def test_pieces_lie_in_one_group_and_steps_end_with_the_columns(
    group_size: int, columns: int, expected: tuple[int, int]
) -> None:
    pieces = pieces_of(group_size, columns=columns, piece=128, block_k=128)
    assert (pieces.columns, pieces.count) == expected
    assert group_size % pieces.columns == 0
    assert columns % (pieces.columns * pieces.count) == 0


def test_wrong_calls_are_refused_with_both_values(round_matrix: RoundMatrix, device: str) -> None:
    weight = round_matrix(torch.randn(16, 128), group_size=64).to(device)
    x = torch.randn(3, 128, device=device)
    with pytest.raises(ValueError, match=r"\(3, 64\), the weight \(16, 128\)"):
        run(x[:, :64].contiguous(), weight)
    with pytest.raises(ValueError, match="float64, not one of"):
        run(x.double(), weight)
    with pytest.raises(ValueError, match=r"strides \(1, 3\) for \(3, 128\)"):
        run(x.T.contiguous().T, weight)
    with pytest.raises(ValueError, match="4 bytes behind a multiple of 16"):
        run(torch.randn(3 * 128 + 1, device=device)[1:].view(3, 128), weight)
    with pytest.raises(ValueError, match="scale is on meta, the rows on"):
        run(x, replace(weight, scale=weight.scale.to("meta")))
    with pytest.raises(ValueError, match=r"the weight has 4 bits, the configuration is for \(8,\)"):
        run(x, weight, config=replace(ONE, bits=(8,)))
    with pytest.raises(ValueError, match="groups of 16 columns are no multiple of 32"):
        run(x, round_matrix(torch.randn(16, 128), group_size=16).to(device))
    with pytest.raises(ValueError, match="holds 0 numbers of 0 tiles, 3072 of 1 are needed"):
        small = split_workspace([ONE], rows=1, features=16, device=device)
        run(x, weight, config=SPLIT, workspace=small)


@pytest.mark.parametrize(
    ("bits", "number"),
    [(bits, number) for number, config in enumerate(CONFIGS) for bits in config.bits],
)
def test_configuration_agrees_with_the_reference(
    bits: int, number: int, round_matrix: RoundMatrix, device: str
) -> None:
    config = CONFIGS[number]
    rows, n = min(config.up_to_rows, 130) - 1, config.block_n + 3
    weight = round_matrix(
        torch.randn(n, 384) * 0.05, bits=bits, group_size=128, asymmetric=config.with_minimum
    )
    x = torch.randn(rows, 384).half()
    y = packed_linear(x.to(device), weight.to(device), config=config)
    torch.testing.assert_close(y.cpu(), packed_linear_reference(x, weight), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("rows", [1, 16, 17, 32, 33, 64, 65, 2048])
@pytest.mark.parametrize("features", [512, 2048, 12352, 248320])
@pytest.mark.parametrize("minimum", [False, True])
def test_table_has_a_configuration_for_every_shape(
    bits: int, rows: int, features: int, minimum: bool
) -> None:
    config = choose(bits=bits, rows=rows, features=features, minimum=minimum)
    assert rows > 64 or rows <= config.block_m  # a pass reads its weights once
    assert config.with_minimum or not minimum
    assert bits in config.bits


@pytest.mark.parametrize("bits", [4, 8])
def test_gate_compiles_every_configuration(bits: int) -> None:
    tiles = {
        (case.constexprs["BLOCK_N"], case.constexprs["BLOCK_M"], case.constexprs["SPLITS"])
        for case in gate_cases()
        if case.constexprs["BITS"] == bits
    }
    expected = {(c.block_n, c.block_m, c.splits) for c in CONFIGS if bits in c.bits}
    assert tiles == expected
