"""`quantize`: the whole command, what it says, and what it refuses."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from clover_local.quant.pipeline import run as library

Run = Callable[..., Any]
QUICK = ("--calibration-tokens", "200", "--evaluation-tokens", "100", "--device", "cpu")


@pytest.fixture
def quantize(run: Run, golden_folder: Path, tmp_path: Path) -> Run:
    """Runs `quantize` on the golden model into `tmp_path / "result"`."""
    text = tmp_path / "text.txt"
    text.write_text(
        "=== a\n>>> user\nCount.\n>>> assistant\n" + "one two three four five six seven " * 9,
        encoding="utf-8",
    )

    def quantize(*flags: str, source: Path = golden_folder, result: str = "result") -> Any:
        calibration = () if "--calibration" in flags else ("--calibration", str(text))
        return run("quantize", str(source), str(tmp_path / result), *QUICK, *calibration, *flags)

    return quantize


def test_quantized_model_is_described_and_answers(run: Run, quantize: Run, tmp_path: Path) -> None:
    outcome = quantize()
    assert outcome.code == 0
    for text in (
        "Experts: relative output error",
        "gate_proj",
        "bits per weight",
        "KL in nats, masked rows at ratio 1.0",
    ):
        assert text in outcome.out
    assert "note: group size 32, because the profile's 128 does not divide" in outcome.err
    assert "layer 4 of 4 · tokens an expert" in outcome.err
    assert "of memory at most" in outcome.err
    assert run("verify", str(tmp_path / "result")).code == 0
    answer = run(
        "generate", str(tmp_path / "result"), "--prompt-ids", "3,4", "--max-new-tokens", "4"
    )
    assert answer.code == 0


def test_second_run_says_that_it_is_finished(quantize: Run) -> None:
    first = quantize("--json")
    second = quantize("--json")
    assert second.code == 0
    assert second.out == first.out
    assert "made" not in second.err
    assert "is finished already: nothing to do" in quantize().out


def test_json_is_the_report_and_quiet_leaves_nothing_else(quantize: Run, tmp_path: Path) -> None:
    outcome = quantize("--json", "--quiet")
    assert outcome.err == ""
    stored = (tmp_path / "result" / "quantization_report.json").read_text(encoding="utf-8")
    assert json.loads(outcome.out) == json.loads(stored)


def test_experts_under_the_floor_are_noted(quantize: Run) -> None:
    outcome = quantize("--min-tokens", "100000", "--evaluation-tokens", "0")
    assert "note: 32 experts saw fewer rows than --min-tokens" in outcome.err


def test_flag_without_effect_is_noted(quantize: Run) -> None:
    outcome = quantize("--method", "rtn", "--damp", "0.1", "--evaluation-tokens", "0")
    assert outcome.code == 0
    assert "note: --damp has no effect with --method rtn" in outcome.err


def test_interrupt_says_how_to_continue(quantize: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*arguments: Any, **others: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(library, "write_index", interrupted, raising=False)
        patch.setattr(library, "write_description", interrupted)
        outcome = quantize()
    assert outcome.code == 130
    assert outcome.err.splitlines()[-1] == "stopped: the same command continues"
    again = quantize()
    assert again.code == 0
    assert "layer 1 of 4" not in again.err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--profile", "resident"], "resident comes with 3-bit kernels"),
        (["--profile", "best"], "--profile best is unknown: use balanced or quality"),
        (["--method", "exl2"], "--method exl2 is unknown"),
        (["--group-size", "48"], "--group-size 48 does not divide hidden_size 64"),
        (["--trunk-bits", "4"], "--trunk-bits 4: use 8, or 16"),
        (["--memory", "much"], "'much' is no size"),
        (["--memory", "100MiB"], "--memory 100MiB is too little"),
        (["--memory", "104857600"], "--memory 100MiB is too little"),
        (["--device", "tpu"], "--device tpu is unknown"),
        (["--calibration", "/no/such/file"], "/no/such/file cannot be read"),
        (["--calibration-tokens", "0"], "--calibration-tokens 0 is out of range"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_flags_are_refused_before_anything_is_made(
    quantize: Run, tmp_path: Path, flags: list[str], message: str
) -> None:
    outcome = quantize(*flags)
    assert outcome.code == 1
    assert message in outcome.err
    assert len(outcome.err.splitlines()) <= 2
    assert not (tmp_path / "result").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"", "is empty"), (b"\xff\xfe\x00", "UTF-8")],
    ids=["empty", "not UTF-8"],
)
def test_calibration_file_that_is_no_text_is_refused(
    quantize: Run, tmp_path: Path, content: bytes, message: str
) -> None:
    (tmp_path / "bad.txt").write_bytes(content)
    outcome = quantize("--calibration", str(tmp_path / "bad.txt"))
    assert outcome.code == 1
    assert message in outcome.err
    assert not (tmp_path / "result").exists()


def test_places_that_are_taken_are_refused(
    quantize: Run, model_folder: Path, tmp_path: Path
) -> None:
    inside = quantize(source=model_folder, result="model/int4")
    assert inside.code == 1
    assert "lies inside the source" in inside.err
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text("{}", encoding="utf-8")
    assert "holds another checkpoint" in quantize(result="other").err


def test_damaged_and_quantized_sources_are_refused(
    quantize: Run, model_folder: Path, tmp_path: Path
) -> None:
    weights = load_file(model_folder / "model.safetensors")
    weights["model.layers.0.mlp.gate.weight"][0, 0] = float("nan")
    save_file(weights, model_folder / "model.safetensors")
    damaged = quantize(source=model_folder, result="a")
    assert damaged.code == 1
    assert "model.layers.0.mlp.gate.weight holds NaN or infinity" in damaged.err
    assert quantize().code == 0
    again = quantize(source=tmp_path / "result", result="b")
    assert again.code == 1
    assert "is already quantized" in again.err


def test_other_arguments_for_a_finished_result_are_refused(quantize: Run) -> None:
    assert quantize("--evaluation-tokens", "0").code == 0
    outcome = quantize("--seed", "1", "--evaluation-tokens", "0")
    assert outcome.code == 1
    assert "was made with seed 0, not 1: use another folder, or delete this one" in outcome.err
