"""What the bench times and counts; it times nothing here."""

import pytest
import torch

from clover_local.kernels.gpu import bench
from clover_local.kernels.gpu.bench import (
    USED,
    count_pass,
    count_tiles,
    expert_calls,
    logits_for,
    random_records,
    real_layout,
)
from clover_local.kernels.gpu.experts.record import MatrixFormat, record_layout
from clover_local.kernels.gpu.route import route_sorted


@pytest.mark.parametrize(("rows", "distinct"), USED, ids=lambda value: str(value))
def test_rows_use_as_many_experts_as_asked_for(rows: int, distinct: int) -> None:
    expert_ids = logits_for(rows, distinct).topk(bench.TOP_K).indices
    assert len(expert_ids.unique()) == distinct


def test_more_experts_than_choices_are_refused() -> None:
    with pytest.raises(ValueError, match="1 rows of 8 choices cannot use 9 of 256"):
        logits_for(1, 9)


@pytest.mark.parametrize("rows", [5, 33])
def test_counted_tiles_are_those_of_the_routing(rows: int, device: str) -> None:
    logits = logits_for(rows, 7, experts=11, top_k=3)
    routing = route_sorted(logits.to(device), top_k=3, tile_rows=8)
    counted = count_tiles(routing.routing.expert_ids, experts=11, tile_rows=8)
    assert counted == int(routing.tile_count)


@pytest.mark.parametrize(("rows", "distinct"), USED, ids=lambda value: str(value))
def test_pass_reads_each_weight_once(rows: int, distinct: int) -> None:
    counted = count_pass(rows, distinct)
    assert counted.tiles == distinct
    assert counted.nbytes <= 1.02 * counted.least


def test_record_is_that_of_the_real_model() -> None:
    assert real_layout().nbytes == 1_622_016


def test_both_kernels_run_on_experts_in_any_place(device: str) -> None:
    matrix = MatrixFormat(4, 32, torch.bfloat16, False)
    layout = record_layout(64, 32, gate_up=matrix, down=matrix)
    records = random_records(11, layout, device=device)
    logits = logits_for(3, 5, experts=8, top_k=2)
    calls = expert_calls(records, layout, logits=logits, top_k=2)
    assert len(calls.ours) == len(calls.plain) == 2
    for call in (*calls.ours, *calls.plain):
        result = call()
        assert isinstance(result, torch.Tensor)
        assert result.isfinite().all()


def test_bench_without_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="torch sees no CUDA GPU"):
        bench.main([])


def test_counts_need_no_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    bench.main(["--count"])
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split()[-1] == "ratio"
    assert len(lines) == len(USED)
