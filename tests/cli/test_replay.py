"""`clover-local replay` on runs of the golden model."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Call = Callable[..., Any]


def change(path: Path, index: int, edit: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Changes the pass or verify number `index` of a trace; returns it as it was."""
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    chosen = [each for each in records if each["record"] in ("pass", "verify")][index]
    before: dict[str, Any] = json.loads(json.dumps(chosen))
    edit(chosen)
    path.write_text("".join(json.dumps(each) + "\n" for each in records), encoding="utf-8")
    return before


@pytest.fixture
def traced(run: Call, model_folder: Path, tmp_path: Path) -> Callable[..., Path]:
    """Writes the trace of a run with these flags."""

    def traced(*arguments: str) -> Path:
        path = tmp_path / "run.jsonl"
        common = ("-p", "hello", "--max-new-tokens", "40", "--trace", str(path))
        assert run("generate", str(model_folder), *common, *arguments).code == 0
        return path

    return traced


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("--mode", "ar", "--temperature", "1", "--seed", "9"),
        ("--mode", "draft", "--frequency-penalty", "0.5", "--suppress", "3,4"),
        ("--context", "60", "--threshold", "0.3"),
        ("--mode", "auto", "--max-new-tokens", "90"),
        ("--mode", "auto", "--auto", "draft,ar", "--temperature", "0.8", "--min-new-tokens", "80"),
    ],
    ids=["denoise", "ar-drawn", "draft", "context", "auto", "auto-drawn"],
)
def test_a_run_is_the_same_again(run: Call, traced: Call, arguments: tuple[str, ...]) -> None:
    outcome = run("replay", str(traced(*arguments)))
    assert (outcome.code, outcome.out.split(":")[0]) == (0, "equal")


def test_tokens_that_stand_in_for_repeats_are_the_same_again(run: Call, traced: Call) -> None:
    """Four tokens are left to write with, so their neighbours often want the same."""
    suppressed = ",".join(str(token) for token in range(512) if token not in (70, 71, 72, 73))
    path = traced("--in-block-repetition", "--suppress", suppressed, "--threshold", "0.2")
    assert '"reason": "other_token"' in path.read_text(encoding="utf-8")
    assert run("replay", str(path)).out.split(":")[0] == "equal"


def test_the_first_pass_that_differs_is_named_with_rows_and_tokens(run: Call, traced: Call) -> None:
    path = traced()

    def other_token(record: dict[str, Any]) -> None:
        record["fixed"][0]["token"] = 5

    before = change(path, 2, other_token)
    row, token = before["fixed"][0]["row"], before["fixed"][0]["token"]
    outcome = run("replay", str(path))
    assert outcome.code == 1
    assert outcome.out == (
        f"differs in run 0, block {before['block']}, pass {before['pass']}: "
        f"rows {row}: tokens {token}, the trace has tokens 5\n"
    )
    found = json.loads(run("replay", str(path), "--json").out)
    assert (found["equal"], found["passes"]) == (False, 3)
    assert found["difference"]["rows"] == [row]
    assert found["difference"]["recorded"][0] == [row, 5]


def test_a_verify_that_differs_is_named_by_its_round(run: Call, traced: Call) -> None:
    path = traced("--mode", "draft")
    kinds = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    steps = [each for each in kinds if each["record"] in ("pass", "verify")]
    index = next(i for i, each in enumerate(steps) if each["record"] == "verify")
    change(path, index, lambda record: record["fixed"].pop())
    outcome = run("replay", str(path))
    assert outcome.code == 1
    assert "verify of round" in outcome.out and "none" in outcome.out


def test_other_drafts_accepted_differ_too(run: Call, traced: Call) -> None:
    path = traced("--mode", "draft")
    change(path, 2, lambda record: record.update(accepted=record["accepted"] + 1))
    outcome = run("replay", str(path))
    assert outcome.code == 1
    assert "the drafts accepted are others" in outcome.out


def test_other_ids_at_the_end_differ_too(run: Call, traced: Call) -> None:
    path = traced()
    text = path.read_text(encoding="utf-8")
    head, _, tail = text.rpartition('"token_ids": [')
    path.write_text(f'{head}"token_ids": [3, {tail}', encoding="utf-8")
    outcome = run("replay", str(path))
    assert outcome.code == 1
    assert "with other token ids than the trace has" in outcome.out


def test_a_last_line_that_a_stop_cut_off_is_left_out(run: Call, traced: Call) -> None:
    path = traced()
    text = path.read_text(encoding="utf-8")
    path.write_text(text[:-20], encoding="utf-8")
    outcome = run("replay", str(path))
    assert (outcome.code, outcome.out.split(":")[0]) == (0, "equal")


def test_another_end_differs_too(run: Call, traced: Call) -> None:
    path = traced()
    text = path.read_text(encoding="utf-8").replace('"length"', '"stop"')
    path.write_text(text, encoding="utf-8")
    outcome = run("replay", str(path))
    assert (outcome.code, outcome.out) == (
        1,
        "differs in run 0, at the end: length, the trace has stop\n",
    )


def test_a_run_that_was_stopped_is_compared_as_far_as_it_went(run: Call, traced: Call) -> None:
    path = traced()
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    path.write_text("".join(lines[:6]), encoding="utf-8")
    steps = sum('"record": "pass"' in line for line in lines[:6])
    outcome = run("replay", str(path))
    assert (outcome.code, outcome.out) == (0, f"equal: {steps} passes of 1 runs\n")


def test_another_model_is_said_and_with_strict_refused(
    run: Call, traced: Call, model_folder: Path
) -> None:
    path = traced()
    config = model_folder / "config.json"
    config.write_text(config.read_text(encoding="utf-8") + "\n", encoding="utf-8")
    outcome = run("replay", str(path))
    assert outcome.code == 0
    assert "made with another model (hash" in outcome.err
    outcome = run("replay", str(path), "--strict")
    assert (outcome.code, outcome.out, outcome.err.count("\n")) == (1, "", 1)
    outcome = run("replay", str(path), "--model", "demo")
    assert outcome.code == 1
    assert "--model" in outcome.err.splitlines()[-1]


def test_a_trace_that_cannot_be_replayed_is_one_line(
    run: Call, traced: Call, tmp_path: Path
) -> None:
    path = traced()
    good = path.read_text(encoding="utf-8")
    for text in (
        good[:-20] + "\n",
        good.replace('"seed": 0, "suppress"', '"speed": 9, "suppress"'),
        good.replace('"top_p": 1.0', '"top_p": 7'),
        "not a trace",
        "",
    ):
        path.write_text(text, encoding="utf-8")
        outcome = run("replay", str(path), "--quiet")
        assert (outcome.code, outcome.out, outcome.err.count("\n")) == (1, "", 1), outcome.err
    assert run("replay", str(tmp_path / "absent")).code == 1
