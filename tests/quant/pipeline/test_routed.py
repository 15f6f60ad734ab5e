"""Hessians over routed rows: which rows an expert sees, with which weight."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from clover_local.errors import CloverError
from clover_local.quant.pipeline import routed
from clover_local.quant.pipeline.routed import RoutedRows, SourceRows
from clover_local.quant.pipeline.rows import RowFile

EXPERTS = 5


def rows_of(
    folder: Path, x: Tensor, expert_ids: Tensor, weights: Tensor | None = None
) -> RoutedRows:
    file = RowFile(folder / "x.rows", x.shape[1])
    with file.writer(durable=False) as writer:
        writer.append(x)
    weights = torch.ones(len(x)) if weights is None else weights
    return RoutedRows(file, expert_ids, weights, EXPERTS, "cpu")


@pytest.fixture
def example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RoutedRows:
    """23 rows in chunks of 7; expert 3 sees none, and some rows use one expert only."""
    monkeypatch.setattr(routed, "CHUNK_ROWS", 7)
    generator = torch.Generator().manual_seed(3)
    ids = torch.stack([torch.randperm(4, generator=generator)[:2] for _ in range(23)])
    ids[ids == 3] = 4
    ids[::5, 1] = -1
    weights = torch.rand(23, generator=generator)
    return rows_of(tmp_path, torch.randn(23, 6, generator=generator), ids, weights)


def test_counts_are_those_of_the_routing(example: RoutedRows) -> None:
    expected = [int((example.expert_ids == expert).sum()) for expert in range(EXPERTS)]
    assert example.counts().tolist() == expected
    assert expected[3] == 0
    sums = [
        float(example.weights[(example.expert_ids == expert).any(1)].sum())
        for expert in range(EXPERTS)
    ]
    torch.testing.assert_close(example.weighted_counts(), torch.tensor(sums))


def test_sums_are_weighted_outer_products_of_an_experts_rows(example: RoutedRows) -> None:
    x = example.x.read(0, 23).double()
    totals = example.sums([range(0, 2), range(2, 5)], lambda expert, own: own, width=6)
    for expert, total in enumerate(torch.cat([each.outer for each in totals])):
        used = (example.expert_ids == expert).any(1)
        own = x[used]
        expected = own.T @ (own * example.weights[used, None].double())
        torch.testing.assert_close(total.double(), expected, rtol=1e-5, atol=1e-6)
    assert not totals[1].outer[1].any()
    assert all(each.cross is None and each.drift is None for each in totals)


def test_inputs_may_depend_on_the_expert(example: RoutedRows) -> None:
    (plain,) = example.sums([range(5)], lambda expert, own: own[:, :3], width=3)
    (scaled,) = example.sums([range(5)], lambda expert, own: own[:, :3] * expert, width=3)
    factors = torch.arange(5.0).square()[:, None, None]
    torch.testing.assert_close(scaled.outer, plain.outer * factors)


def test_rows_of_the_source_give_products_with_its_inputs_and_the_drift(
    example: RoutedRows, tmp_path: Path
) -> None:
    source, mixed, quantized_mixed = torch.randn(3, 23, 6, dtype=torch.float64)
    files = {}
    for name, content in (("source", source), ("mixed", mixed), ("quantized", quantized_mixed)):
        files[name] = RowFile(tmp_path / f"{name}.rows", 6)
        with files[name].writer(durable=False) as writer:
            writer.append(content)
    rows = replace(example, source=SourceRows(files["source"], files["mixed"], files["quantized"]))
    batches = [range(0, 2), range(2, 5)]
    plain = rows.sums(batches, lambda expert, own: own, width=6)
    assert all(each.drift is None for each in plain)
    sums = rows.sums(
        batches,
        lambda expert, own: own[:, :4],
        width=4,
        source_inputs=lambda expert, own: own[:, 2:] * expert,
        with_drift=True,
    )
    x = example.x.read(0, 23).double()
    for expert in range(EXPERTS):
        used = (example.expert_ids == expert).any(1)
        weighted = x[used] * example.weights[used, None].double()
        batch, place = (0, expert) if expert < 2 else (1, expert - 2)
        for result, differences, width in (
            (plain[batch].cross, source[used] - x[used], 6),
            (sums[batch].cross, source[used, 2:] * expert - x[used, :4], 4),
            (sums[batch].drift, mixed[used] - quantized_mixed[used], 4),
        ):
            assert result is not None
            expected = differences.T @ weighted[:, :width]
            torch.testing.assert_close(result[place].double(), expected, rtol=1e-4, atol=1e-5)


def test_pooled_is_the_mean_over_what_all_experts_see(example: RoutedRows) -> None:
    (totals,) = example.sums([range(EXPERTS)], lambda expert, own: own, width=6)
    expected = totals.outer.sum(0) / example.weighted_counts().sum()
    torch.testing.assert_close(example.pooled(), expected)


def test_sample_is_spread_evenly(example: RoutedRows, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routed, "SAMPLE_ROWS", 3)
    sample = example.sample()
    assert torch.equal(sample.x, example.x.read(0, 23)[[0, 11, 22]])


def test_rows_that_reach_no_expert_are_a_loud_failure(tmp_path: Path) -> None:
    rows = rows_of(tmp_path, torch.randn(4, 6), torch.full((4, 2), -1))
    with pytest.raises(CloverError, match="no row of the calibration text reached an expert"):
        rows.pooled()


def test_rows_that_are_no_numbers_are_a_loud_failure(tmp_path: Path) -> None:
    x = torch.randn(4, 6)
    x[2, 3] = float("inf")
    rows = rows_of(tmp_path, x, torch.zeros(4, 1, dtype=torch.long))
    with pytest.raises(CloverError, match="hidden states that are no numbers"):
        rows.pooled()
