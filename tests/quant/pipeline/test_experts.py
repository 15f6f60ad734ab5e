"""Experts of a layer: every one is quantized, whatever it saw; in any waves the same."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from clover_local.kernels.packed import PackedWeight, Weight
from clover_local.quant.hessian import outer, relative_error
from clover_local.quant.memory import MemoryPlan
from clover_local.quant.pipeline.experts import QuantizedExperts, quantize_experts
from clover_local.quant.pipeline.routed import RoutedRows, SourceRows
from clover_local.quant.pipeline.rows import RowFile
from clover_local.quant.profiles import Recipe

EXPERTS, HIDDEN, INNER, ROWS = 5, 64, 32, 300
MakeRecipe = Callable[..., Recipe]
Quantize = Callable[..., QuantizedExperts]


@pytest.fixture(scope="module")
def weights() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(5)
    return [
        (
            torch.randn(2 * INNER, HIDDEN, generator=generator).bfloat16(),
            torch.randn(HIDDEN, INNER, generator=generator).bfloat16(),
        )
        for _ in range(EXPERTS)
    ]


@pytest.fixture
def rows(tmp_path: Path) -> RoutedRows:
    """Correlated rows; the last expert sees none of them."""
    generator = torch.Generator().manual_seed(6)
    mixing = torch.randn(HIDDEN, HIDDEN, generator=generator) * torch.logspace(0, -2, HIDDEN)
    file = RowFile(tmp_path / "x.rows", HIDDEN)
    with file.writer(durable=False) as writer:
        writer.append(torch.randn(ROWS, HIDDEN, generator=generator) @ mixing.T)
    ids = torch.stack([torch.randperm(4, generator=generator)[:2] for _ in range(ROWS)])
    return RoutedRows(file, ids, torch.ones(ROWS), EXPERTS, "cpu")


@pytest.fixture
def drifted(rows: RoutedRows, tmp_path: Path) -> RoutedRows:
    """The same rows beside those of a source that they have drifted from."""
    generator = torch.Generator().manual_seed(7)
    x = rows.x.read(0, ROWS)
    noise = x.std() * torch.randn(ROWS, HIDDEN, generator=generator)
    mixed = torch.randn(ROWS, HIDDEN, generator=generator)
    contents = (
        x + 0.3 * x.roll(1, 1) + 0.1 * noise,
        mixed,
        mixed - 0.5 * x + 0.1 * noise,
    )
    files = [RowFile(tmp_path / f"{number}.rows", HIDDEN) for number in range(3)]
    for file, content in zip(files, contents, strict=True):
        with file.writer(durable=False) as writer:
            writer.append(content)
    return replace(rows, source=SourceRows(*files))


@pytest.fixture
def quantized(
    rows: RoutedRows, weights: list[tuple[Tensor, Tensor]], make_recipe: MakeRecipe
) -> Quantize:
    def run(
        recipe: Recipe | None = None,
        *,
        batch: int = 2,
        wave: int = 5,
        rows: RoutedRows = rows,
    ) -> QuantizedExperts:
        def read(experts: Sequence[int]) -> list[tuple[Weight, Weight]]:
            return [weights[expert] for expert in experts]

        plan = MemoryPlan(batch, wave, -(-EXPERTS // wave), {}, False)
        return quantize_experts(
            rows, read, inner_size=INNER, recipe=recipe or make_recipe(), plan=plan
        )

    return run


def bytes_of(experts: QuantizedExperts) -> list[bytes]:
    return [
        part.flatten().view(torch.uint8).numpy().tobytes()
        for pair in experts.pairs
        for weight in pair
        if isinstance(weight, PackedWeight)
        for part in (weight.data, weight.scale)
    ]


def test_every_expert_is_quantized_even_one_without_a_row(quantized: Quantize) -> None:
    result = quantized()
    assert len(result.pairs) == EXPERTS
    for gate_up, down in result.pairs:
        assert isinstance(gate_up, PackedWeight)
        assert isinstance(down, PackedWeight)
        assert (gate_up.shape, down.shape) == ((2 * INNER, HIDDEN), (HIDDEN, INNER))
        assert bool((gate_up.scale > 0).all())
        assert bool(torch.isfinite(gate_up.dequantize()).all())


def test_output_error_is_smaller_than_that_of_rounding(
    quantized: Quantize,
    make_recipe: MakeRecipe,
    rows: RoutedRows,
    weights: list[tuple[Tensor, Tensor]],
) -> None:
    gptq, rtn = quantized(), quantized(make_recipe(method="rtn"))
    x = rows.x.read(0, ROWS)
    for expert in range(EXPERTS):
        used = (rows.expert_ids == expert).any(1)
        hessian = outer(x[used] if used.any() else x)
        errors = [
            float(relative_error(weights[expert][0], gate_up.dequantize(), hessian))
            for gate_up in (gptq.pairs[expert][0], rtn.pairs[expert][0])
            if isinstance(gate_up, PackedWeight)
        ]
        assert errors[0] < 0.8 * errors[1]


def test_reported_errors_are_close_to_the_true_ones(
    quantized: Quantize, rows: RoutedRows, weights: list[tuple[Tensor, Tensor]]
) -> None:
    result = quantized()
    gate, up, down = result.reports
    assert [report.kind for report in result.reports] == ["gate_proj", "up_proj", "down_proj"]
    x = rows.x.read(0, ROWS)
    true = []
    for expert in range(4):
        gate_up = result.pairs[expert][0]
        assert isinstance(gate_up, PackedWeight)
        own = x[(rows.expert_ids == expert).any(1)]
        before, after = weights[expert][0][:INNER], gate_up.dequantize()[:INNER]
        true.append(float(relative_error(before, after, outer(own))))
    assert gate.method is not None
    assert gate.method.median == pytest.approx(sorted(true)[2], rel=0.5)
    for report in (gate, up, down):
        assert report.method is not None
        assert report.rtn is not None
        assert report.method.median < report.rtn.median


@pytest.mark.parametrize("wave", [2, 4])
@pytest.mark.parametrize("name", ["rows", "drifted"])
def test_waves_change_no_bit(
    quantized: Quantize, request: pytest.FixtureRequest, name: str, wave: int
) -> None:
    rows: RoutedRows = request.getfixturevalue(name)
    small, large = (quantized(wave=each, rows=rows) for each in (wave, 5))
    assert bytes_of(small) == bytes_of(large)


def test_experts_make_good_what_their_inputs_and_the_hidden_states_lack(
    quantized: Quantize, drifted: RoutedRows, weights: list[tuple[Tensor, Tensor]]
) -> None:
    assert drifted.source is not None
    x, source = drifted.x.read(0, ROWS), drifted.source.x.read(0, ROWS)
    drift = drifted.source.drift(0, ROWS)
    results = [quantized(rows=each) for each in (drifted, replace(drifted, source=None))]
    for expert in range(4):
        used = (drifted.expert_ids == expert).any(1)
        gate_up, down = (weight.float() for weight in weights[expert])
        target = mlp(source[used], gate_up, down) + drift[used]
        errors = []
        for result in results:
            pair = [
                weight.dequantize()
                for weight in result.pairs[expert]
                if isinstance(weight, PackedWeight)
            ]
            errors.append(float((mlp(x[used], *pair) - target).norm()))
        assert errors[0] < 0.6 * errors[1]


def mlp(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    gate, up = (x @ gate_up.T).chunk(2, dim=-1)
    return (F.silu(gate) * up) @ down.T


def test_rounding_pays_no_heed_to_the_source(
    quantized: Quantize, drifted: RoutedRows, make_recipe: MakeRecipe
) -> None:
    recipe = make_recipe(method="rtn")
    assert bytes_of(quantized(recipe, rows=drifted)) == bytes_of(quantized(recipe))


def test_down_projections_become_int8_above_the_limit(
    quantized: Quantize, make_recipe: MakeRecipe
) -> None:
    kept = quantized(replace(make_recipe(), down_error_limit=1.0))
    safe = quantized(replace(make_recipe(), down_error_limit=0.0))
    assert [report.bits for report in kept.reports] == [4, 4, 4]
    assert [report.bits for report in safe.reports] == [4, 4, 8]
    assert bytes_of(kept) == bytes_of(quantized())
    assert all(isinstance(down, PackedWeight) and down.bits == 8 for _, down in safe.pairs)


def test_dead_inputs_are_counted(quantized: Quantize, rows: RoutedRows, tmp_path: Path) -> None:
    x = rows.x.read(0, ROWS)
    x[:, 7] = 0
    with rows.x.writer(durable=False) as writer:
        writer.append(x)
    result = quantized()
    assert result.dead_inputs == EXPERTS
    for gate_up, _ in result.pairs:
        assert isinstance(gate_up, PackedWeight)
        assert not gate_up.dequantize()[:, 7].any()


def test_nf4_stores_values_in_the_sources_dtype(
    quantized: Quantize, make_recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "clover_local.quant.pipeline.experts.nf4_round", lambda weight: weight * 0.5
    )
    result = quantized(replace(make_recipe(), method="nf4"))
    assert all(weight.dtype == torch.bfloat16 for pair in result.pairs for weight in pair)  # type: ignore[union-attr]
    assert [(report.bits, report.group_size) for report in result.reports] == [(16, None)] * 3
