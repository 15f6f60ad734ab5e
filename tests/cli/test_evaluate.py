"""`clover-local evaluate`, from the arguments to the table."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Run = Callable[..., Any]


@pytest.fixture
def text(tmp_path: Path) -> str:
    path = tmp_path / "text.txt"
    path.write_text(">>> user\nHello\n>>> assistant\nHello, it is a fine day.\n", encoding="utf-8")
    return str(path)


def test_table_of_a_model_alone(run: Run, golden_folder: Path, text: str) -> None:
    done = run("evaluate", str(golden_folder), "--text", text)
    assert done.code == 0, done.err
    assert "bits per weight" in done.out
    assert "perplexity, masked tokens" in done.out
    assert "KL" not in done.out
    assert "right answers" not in done.out


def test_table_against_another_model(run: Run, golden_folder: Path, text: str) -> None:
    folder = str(golden_folder)
    done = run("evaluate", folder, "--against", folder, "--text", text, "--quiet")
    assert done.code == 0, done.err
    assert f"distance from {folder}" in done.out
    assert "KL in nats, causal rows  0.00000" in done.out
    assert "same likeliest token     100.00 %" in done.out
    assert done.err == ""


def test_json_is_one_object(run: Run, golden_folder: Path, text: str) -> None:
    done = run("evaluate", str(golden_folder), "--text", text, "--json")
    found = json.loads(done.out)
    assert found["model"] == str(golden_folder)
    assert found["against"] is None
    assert found["task_accuracy"] == {}


def test_demo_is_asked_questions(run: Run) -> None:
    done = run("evaluate", "demo", "--tokens", "200", "--questions", "1")
    assert done.code == 0, done.err
    assert "right answers, ar" in done.out
    assert "tokens per preview, denoise" in done.out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--plot", "chart.gif"), "a chart is .png or .svg"),
        (("--text", "none.txt"), "none.txt cannot be read"),
        (("--device", "tpu"), "--device tpu is unknown"),
        (("--against", "demo"), "vocab_size"),
        (("--against", "nowhere"), "there is no folder 'nowhere'"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_wrong_calls_say_what_to_do(
    arguments: tuple[str, ...], message: str, run: Run, golden_folder: Path
) -> None:
    done = run("evaluate", str(golden_folder), *arguments)
    assert done.code == 1
    assert message in done.err
    assert done.out == ""


@pytest.mark.parametrize("flag", [("--tokens", "1"), ("--questions", "-1"), ("--seed", "x")])
def test_impossible_numbers_are_usage_errors(
    flag: tuple[str, str], run: Run, golden_folder: Path
) -> None:
    assert run("evaluate", str(golden_folder), *flag).code == 2
