"""The bench of whole passes: all but the times, without a card."""

import contextlib
import io
import json
from dataclasses import replace
from typing import Any

import pytest
import torch

from clover_local.bench import gpu_pass
from clover_local.bench.floor import Widths
from clover_local.bench.gpu_forwards import Forward, Loop, Prompt, Rate, Sizes, least_bytes
from clover_local.bench.gpu_pass import Report, fitting_layers, measure, weight_bytes
from clover_local.bench.models import real_layers
from clover_local.config import ModelConfig
from clover_local.kernels.choice import VARIABLE
from clover_local.kernels.gpu.bench import Figure

SIZES = Sizes(prefix=1, commit_rows=4, blocks=1, prompt=2, chunk=2)
GIB = 1 << 30


@pytest.fixture
def report() -> Report:
    """Of the real model, with figures that were made up."""
    return Report(
        card="a card",
        layers=40,
        experts=256,
        head_bits=8,
        rate=Rate(1e12, 1e-5),
        figure=Figure("experts", 32, 70, seconds=2.0, nbytes=1_800_000_000_000, plain_seconds=5.0),
        forwards=(Forward("pass", 32, 70.0, seconds=0.012, nbytes=8e9, floor_seconds=0.01),),
        loop=Loop(wall_seconds=0.0125, pass_seconds=0.012, pick_seconds=0.0004),
        prompt=Prompt(tokens=4000, seconds=0.8, first_block_seconds=1.1),
    )


@pytest.mark.slow
def test_forwards_loop_and_prompt_are_timed_beside_their_floor(
    tiny_config: ModelConfig, card: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "triton")
    said: list[str] = []
    report = measure(
        tiny_config,
        card,
        head_bits=4,
        device=torch.device("cpu"),
        dtype=torch.float32,
        sizes=SIZES,
        on_fallback=said.append,
    )
    assert said == []
    assert [f.name for f in report.forwards] == ["pass", "commit", "AR token"]
    assert [f.rows for f in report.forwards] == [2, 4, 1]
    for forward in report.forwards:
        assert forward.seconds == 0.3
        assert forward.floor_seconds == pytest.approx(forward.nbytes / 1e9 + 1e-5)
        assert 2 <= forward.distinct_experts <= 5
    assert report.forwards[2].distinct_experts == 2
    assert report.loop == Loop(wall_seconds=0.5, pass_seconds=0.3, pick_seconds=0.1)
    assert report.prompt == Prompt(tokens=2, seconds=0.5, first_block_seconds=1.0)


def test_goals_are_ratios_of_what_was_measured(report: Report) -> None:
    goals = [(goal.id, round(goal.value, 6)) for goal in report.goals()]
    assert goals == [
        ("P1", 1.2),
        ("P2", 0.9),
        ("P3", 2.5),
        ("P18", 0.008),
        ("P20", 5000.0),
        ("P20", 1.1),
    ]


def test_goals_stand_below_the_table(report: Report, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = run_main(report, [], monkeypatch)
    assert "40 layers of 256 experts, head of 8 bits" in shown
    assert "P18  share of a pass outside the device         0.008   (<= 0.03 wanted)" in shown


def test_figures_can_be_printed_for_programs(
    report: Report, monkeypatch: pytest.MonkeyPatch
) -> None:
    printed = json.loads(run_main(report, ["--json"], monkeypatch))
    assert printed["forwards"][0]["name"] == "pass"
    assert [goal["id"] for goal in printed["goals"]][-1] == "P20"


def run_main(report: Report, arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> str:
    """What the command prints on a card of 16 GiB whose figures are those of `report`."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (16 * GIB, 16 * GIB))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(gpu_pass, "measure", lambda *_, **__: report)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        gpu_pass.main(arguments)
    return printed.getvalue()


def test_a_floor_is_the_bytes_at_the_copy_rate_and_an_empty_graph() -> None:
    assert Rate(1e12, 1e-5).floor(2e12) == 2.00001


def test_bytes_of_a_pass_are_those_of_the_specification() -> None:
    """`GB` of a typical pass: 70 experts a layer, INT8 trunk and head; state once, no context."""
    config = real_layers(layers=40, experts=256, vocabulary=248320)
    widths = Widths(trunk=1 + 2 / 64, experts=0.5 + 2 / 128, head=1 + 2 / 64, cache=2)
    nbytes = least_bytes(config, widths, rows=32, committed=0, distinct=40 * 70)
    assert nbytes / 1e9 == pytest.approx(6.64, rel=0.01)


def test_weights_are_counted_as_they_are_made(tiny_config: ModelConfig) -> None:
    more = replace(tiny_config, num_experts=7)
    expert = 3 * 64 * 32 * gpu_pass.PACKED[4]
    router = 4 * 64
    grown = weight_bytes(more, head_bits=4) - weight_bytes(tiny_config, head_bits=4)
    assert grown == pytest.approx(2 * 2 * (expert + router))


@pytest.mark.parametrize(
    ("gib", "layers"), [(15.4, 24), (24, 40), (139, 40), (6, 4), (3, 0)], ids=str
)
def test_layers_are_as_many_as_fit(gib: float, layers: int) -> None:
    assert fitting_layers(int(gib * GIB), experts=256, head_bits=8) == layers


def test_a_machine_without_a_gpu_is_told_so_in_one_sentence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="torch sees no CUDA GPU, which this bench needs"):
        gpu_pass.main([])


def test_interpreted_kernels_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(SystemExit, match="TRITON_INTERPRET is set"):
        gpu_pass.main([])


def test_a_card_without_room_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (GIB, 2 * GIB))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(SystemExit, match="not even 4 layers fit 1024 MiB"):
        gpu_pass.main([])


@pytest.mark.parametrize(
    ("argument", "says"),
    [("--experts=7", "7: a whole number from 8 to 256"), ("--layers=many", "many: a whole number")],
)
def test_numbers_out_of_range_are_refused(
    argument: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        gpu_pass.main([argument])
    assert says in capsys.readouterr().err
