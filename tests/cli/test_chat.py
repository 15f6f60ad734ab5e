"""`clover-local chat` outside of a terminal."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from clover_local.cli import chat as command

Call = Callable[..., Any]
"""A fixture that is called with the arguments of a command, or of a terminal."""

REAL_MODEL = "Diffuspace/Clover-35B-A3B-Preview"


@pytest.fixture
def demo(monkeypatch: pytest.MonkeyPatch, golden_folder: Path) -> None:
    """The golden model in the place of the bundled one."""
    monkeypatch.setattr(command, "DEMO", str(golden_folder))


def test_a_prompt_is_answered_once_and_stdout_holds_the_answer_only(
    run: Call, golden_folder: Path
) -> None:
    arguments = ("-p", "hello", "--max-new-tokens", "9", "--quiet")
    outcome = run("chat", str(golden_folder), *arguments)
    assert outcome.code == 0
    assert outcome.out == run("generate", str(golden_folder), *arguments).out
    assert outcome.err == ""


def test_without_a_model_the_demo_answers_and_the_real_one_is_named(run: Call, demo: None) -> None:
    outcome = run("chat", "-p", "hello", "--max-new-tokens", "1")
    assert outcome.code == 0
    assert outcome.err.startswith("Model: demo")
    assert REAL_MODEL in outcome.err


def test_lines_of_a_pipe_are_questions(run: Call, golden_folder: Path) -> None:
    outcome = run("chat", str(golden_folder), "--max-new-tokens", "1", stdin=b"one\ntwo\n")
    assert outcome.code == 0
    assert outcome.out.count("\n") >= 2


def test_a_line_that_is_no_utf_8_leaves_the_others_alone(run: Call, golden_folder: Path) -> None:
    lines = b"one\nb\xe9ta\ntwo\n"
    outcome = run("chat", str(golden_folder), "--quiet", "--max-new-tokens", "1", stdin=lines)
    assert outcome.code == 1
    assert outcome.err.count("\n") == 1
    assert "stdin is not UTF-8 (byte 1)" in outcome.err
    assert outcome.out.count("\n") >= 2


def test_a_failed_line_is_code_1(run: Call, golden_folder: Path) -> None:
    outcome = run("chat", str(golden_folder), stdin=b"/nonsense\n")
    assert outcome.code == 1
    assert "unknown command /nonsense" in outcome.err


def test_a_pipe_that_is_no_utf_8_is_one_line(run: Call, golden_folder: Path) -> None:
    outcome = run("chat", str(golden_folder), "--quiet", stdin=b"\xff\n")
    assert outcome.code == 1
    assert outcome.err == "error: stdin is not UTF-8 (byte 0): convert it first, e.g. with iconv\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("-p", ""), "empty"),
        (("-p", "x", "--sampler", "best"), "threshold"),
        (("-p", "x", "--no-think", "--strict"), "no switch"),
        (("-p", "x", "--seed", "1", "--strict"), "temperature 0"),
    ],
)
def test_bad_input_is_one_line_and_code_1(
    run: Call, golden_folder: Path, arguments: tuple[str, ...], words: str
) -> None:
    outcome = run("chat", str(golden_folder), "--quiet", *arguments)
    assert (outcome.code, outcome.out) == (1, "")
    assert outcome.err.count("\n") == 1
    assert words in outcome.err


def test_a_template_that_refuses_is_known_before_the_weights_are_loaded(
    run: Call, golden_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for file in golden_folder.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "chat_template.jinja").write_text("{{ raise_exception('not today') }}")
    monkeypatch.setattr("clover_local.cli.start.load", lambda *a, **o: pytest.fail("loaded"))
    outcome = run("chat", str(tmp_path))
    assert outcome.code == 1
    assert "not today" in outcome.err
    assert outcome.err.count("\n") == 1
