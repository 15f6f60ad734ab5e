"""Whole runs on the golden model: what they leave, and how they go on after any stop."""

import json
import os
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from clover_local.errors import CheckpointError, CloverError
from clover_local.quant import memory
from clover_local.quant.memory import MemoryPlan
from clover_local.quant.pipeline import run
from clover_local.quant.pipeline.layer import Calibration
from clover_local.quant.pipeline.run import Listener, Outcome
from clover_local.quant.pipeline.source import PlainSource, open_source
from clover_local.quant.pipeline.work_folder import WorkFolder
from clover_local.quant.profiles import Recipe
from clover_local.quant.report import LayerReport
from clover_local.session import open_model

MakeRecipe = Callable[..., Recipe]
QuantizeGolden = Callable[..., Outcome]
RunUntilKilled = Callable[[str, Recipe, int], bool]


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def plain(folder: Path) -> PlainSource:
    source = open_source(str(folder))
    assert isinstance(source, PlainSource)
    return source


def test_result_loads_and_says_what_was_done(
    quantize_golden: QuantizeGolden, make_recipe: MakeRecipe
) -> None:
    outcome = quantize_golden(recipe=make_recipe(evaluation_tokens=200))
    opened = open_model(str(outcome.folder))
    assert opened.config.quant_method == "compressed-tensors"
    assert not outcome.was_finished
    report = outcome.report
    assert report["size"]["int4_ratio"] < 0.3
    assert report["evaluation"]["kl_causal"] < 1
    assert set(report["evaluation"]["kl_masked"]) == {f"{n / 10}" for n in range(1, 11)}
    assert len(report["layers"]) == 4
    for layer in report["layers"]:
        assert [expert["kind"] for expert in layer["experts"]] == [
            "gate_proj",
            "up_proj",
            "down_proj",
        ]
        for expert in layer["experts"]:
            assert (expert["bits"], expert["group_size"]) == (4, 32)
            assert 0 < expert["method"]["median"] < expert["rtn"]["median"] < 0.1
        assert len(layer["tokens"]) == 8
        assert sum(layer["tokens"]) > 8 * layer["tokens_min"] >= 0
        assert all(tensor["bits"] == 8 for tensor in layer["tensors"])
    stored = json.loads((outcome.folder / "quantization_report.json").read_text())
    assert stored == report


def test_run_that_is_killed_again_and_again_gives_the_same_bytes(
    quantize_golden: QuantizeGolden,
    make_recipe: MakeRecipe,
    run_until_killed: RunUntilKilled,
) -> None:
    recipe = make_recipe(tokens=100, evaluation_tokens=100)
    whole = quantize_golden("whole", recipe=recipe)
    steps = random.Random(3)
    deaths = 0
    while not run_until_killed("killed", recipe, steps.randrange(10, 70)):
        deaths += 1
    assert deaths >= 3
    assert contents(whole.folder.with_name("killed")) == contents(whole.folder)


def test_stop_at_any_of_the_last_renames_gives_the_same_bytes(
    quantize_golden: QuantizeGolden,
    make_recipe: MakeRecipe,
    run_until_killed: RunUntilKilled,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    recipe = make_recipe(tokens=100)
    whole = contents(quantize_golden("whole", recipe=recipe).folder)
    with monkeypatch.context() as patch:
        patch.setattr(WorkFolder, "finish", lambda place: None)
        with pytest.raises(CloverError):  # its report is not where it will be
            quantize_golden("complete", recipe=recipe)
    step, finished = 0, False
    while not finished:
        name = f"killed{step}"
        shutil.copytree(tmp_path / "complete", tmp_path / name)
        finished = run_until_killed(name, recipe, step)
        quantize_golden(name, recipe=recipe)
        assert contents(tmp_path / name) == whole
        step += 3
    assert step > 12


def test_finished_result_is_left_alone(
    quantize_golden: QuantizeGolden, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = quantize_golden()
    before = {path: path.stat() for path in [first.folder, *first.folder.rglob("*")]}
    second = quantize_golden()
    assert second.was_finished
    assert second.report == first.report
    assert {path: path.stat() for path in [first.folder, *first.folder.rglob("*")]} == before


def test_memory_limit_changes_no_byte(
    quantize_golden: QuantizeGolden, make_recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(memory.BATCH_BYTES, "cpu", 2 * 4 * 64 * 64)  # two experts a batch
    plans: list[MemoryPlan] = []

    def planned(*arguments: Any, **others: Any) -> MemoryPlan:
        plans.append(memory.plan_waves(*arguments, **others))
        return plans[-1]

    monkeypatch.setattr(run, "plan_waves", planned)
    monkeypatch.setattr(memory, "BASELINE", 0)
    monkeypatch.setattr(memory, "PIECE_COPIES", 0)  # so that the wave is what the limit is for
    monkeypatch.setattr(memory, "PASSED_ROWS", 0)
    large = quantize_golden("large", memory=1 << 30)
    of_down = 4 * (2 * 32 * 64 + 2 * 32 * 32 + 32 * 64) + 2 * 2 * 32 * 64
    least = plans[0].stages["experts"] - 6 * of_down
    small = quantize_golden("small", memory=least)
    assert [plan.waves for plan in plans] == [1, 4]
    assert contents(small.folder) == contents(large.folder)


def test_other_arguments_are_refused_before_and_after_the_end(
    quantize_golden: QuantizeGolden, make_recipe: MakeRecipe, tmp_path: Path
) -> None:
    other = tmp_path / "other.txt"
    other.write_text("Another text.", encoding="utf-8")
    stop = Listener(on_layer=stopping)
    with pytest.raises(KeyboardInterrupt):
        quantize_golden(listener=stop)
    with pytest.raises(CheckpointError, match="made with method gptq, not rtn"):
        quantize_golden(recipe=make_recipe(method="rtn"))
    with pytest.raises(CheckpointError, match="made with another calibration text"):
        quantize_golden(calibration=other)
    quantize_golden()
    with pytest.raises(CheckpointError, match="made with min_tokens 64, not 5"):
        quantize_golden(recipe=make_recipe(min_tokens=5))


def stopping(report: LayerReport) -> None:
    if report.layer == 1:
        raise KeyboardInterrupt


def test_interrupted_run_goes_on_behind_its_last_layer(quantize_golden: QuantizeGolden) -> None:
    with pytest.raises(KeyboardInterrupt):
        quantize_golden(listener=Listener(on_layer=stopping))
    layers: list[int] = []
    outcome = quantize_golden(
        listener=Listener(on_layer=lambda report: layers.append(report.layer))
    )
    assert layers == [2, 3]
    assert contents(outcome.folder) == contents(quantize_golden("whole").folder)


def test_changed_source_is_refused(
    quantize_golden: QuantizeGolden, model_folder: Path, make_recipe: MakeRecipe
) -> None:
    with pytest.raises(KeyboardInterrupt):
        quantize_golden(source=plain(model_folder), listener=Listener(on_layer=stopping))
    weights = load_file(model_folder / "model.safetensors")
    weights["model.norm.weight"] += 1
    save_file(weights, model_folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"another source \(model.safetensors differs\)"):
        quantize_golden(source=plain(model_folder))


@pytest.mark.parametrize(
    "name",
    [
        "model.embed_tokens.weight",
        "lm_head.weight",
        "model.layers.0.linear_attn.A_log",
        "model.layers.1.mlp.experts.down_proj",
        "model.layers.2.mlp.shared_expert.up_proj.weight",
    ],
)
def test_tensor_with_nan_or_infinity_is_named(
    quantize_golden: QuantizeGolden, model_folder: Path, name: str
) -> None:
    weights = load_file(model_folder / "model.safetensors")
    weights[name].view(-1)[-1] = float("nan") if "embed" in name else float("inf")
    save_file(weights, model_folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"{name} holds NaN or infinity"):
        quantize_golden(source=plain(model_folder))


def test_full_disk_leaves_nothing_broken_under_a_final_name(
    quantize_golden: QuantizeGolden, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsync, calls = os.fsync, 0

    def full(descriptor: int) -> None:
        nonlocal calls
        calls += 1
        if calls == 9:
            raise OSError(28, "No space left on device")
        fsync(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(CloverError, match="again"):
            quantize_golden()
    outcome = quantize_golden()
    assert contents(outcome.folder) == contents(quantize_golden("whole").folder)


def test_rounding_costs_more_than_gptq(
    quantize_golden: QuantizeGolden, make_recipe: MakeRecipe
) -> None:
    gptq = quantize_golden("gptq", recipe=make_recipe(evaluation_tokens=400, tokens=1000))
    rtn = quantize_golden("rtn", recipe=make_recipe(method="rtn", evaluation_tokens=400))
    for layer in rtn.report["layers"]:
        assert all(expert["rtn"] == expert["method"] for expert in layer["experts"])
    figures = [outcome.report["evaluation"] for outcome in (gptq, rtn)]
    assert figures[0]["kl_causal"] < figures[1]["kl_causal"]
    assert figures[0]["kl_masked_mean"] < figures[1]["kl_masked_mean"]


def test_quality_takes_int8_where_int4_loses_too_much(
    quantize_golden: QuantizeGolden, make_recipe: MakeRecipe
) -> None:
    recipe = make_recipe(profile="quality")
    medians = [
        layer["experts"][2]["method"]["median"]
        for layer in quantize_golden("a", recipe=replace(recipe, down_error_limit=1.0)).report[
            "layers"
        ]
    ]
    limit = sorted(medians)[1]
    layers = quantize_golden("b", recipe=replace(recipe, down_error_limit=limit)).report["layers"]
    expected = [8 if median > limit else 4 for median in medians]
    assert [layer["experts"][2]["bits"] for layer in layers[:1]] == expected[:1]
    assert {layer["experts"][2]["bits"] for layer in layers} == {4, 8}
    assert all(layer["experts"][0]["bits"] == 4 for layer in layers)


def test_trunk_and_head_may_stay_as_they_are(
    quantize_golden: QuantizeGolden, make_recipe: MakeRecipe, golden_folder: Path
) -> None:
    outcome = quantize_golden(recipe=make_recipe(profile="quality", trunk_bits=16))
    before = load_file(golden_folder / "model.safetensors")
    after = {
        name: tensor
        for path in outcome.folder.glob("*.safetensors")
        for name, tensor in load_file(path).items()
    }
    kept = {name for name in before if ".experts." not in name}
    assert all(torch.equal(after[name], before[name]) for name in kept)
    assert all(after[name].dtype == before[name].dtype for name in kept)


def test_experts_that_saw_few_rows_are_listed(
    quantize_golden: QuantizeGolden, make_recipe: MakeRecipe
) -> None:
    outcome = quantize_golden(recipe=make_recipe(tokens=40))
    layers = outcome.report["layers"]
    few = [
        [expert for expert, tokens in enumerate(layer["tokens"]) if tokens < 64] for layer in layers
    ]
    assert [layer["few_tokens"] for layer in layers] == few
    assert outcome.report["experts_under_min_tokens"] == sum(map(len, few)) > 0


def test_rows_that_count_for_nothing_are_a_loud_failure(
    quantize_golden: QuantizeGolden, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Calibration, "row_weights", lambda self: torch.zeros(self.starts[-1]))
    with pytest.raises(CloverError, match="no row of the calibration text reached an expert"):
        quantize_golden()


def test_model_without_diffusion_parameters_is_calibrated_on_commits_alone(
    quantize_golden: QuantizeGolden, model_folder: Path, make_recipe: MakeRecipe
) -> None:
    weights = load_file(model_folder / "model.safetensors")
    kept = {
        name: tensor
        for name, tensor in weights.items()
        if "bd_softmax" not in name and "conv_right" not in name
    }
    save_file(kept, model_folder / "model.safetensors")
    recipe = make_recipe(evaluation_tokens=100)
    outcome = quantize_golden(source=plain(model_folder), recipe=recipe)
    assert sum(outcome.report["layers"][0]["tokens"]) < 2 * 2 * 600
    assert outcome.report["evaluation"]["tokens_per_preview"] is None
