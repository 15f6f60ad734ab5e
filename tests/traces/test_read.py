"""The reader of traces: what it finds in a run's file, and damaged ones in one sentence."""

import json
from pathlib import Path
from typing import Any

import pytest

from clover_local.decoding.trace import choice_record
from clover_local.errors import TraceError
from clover_local.traces.read import read_runs

HEADER: dict[str, Any] = {
    "record": "header",
    "model": "demo",
    "model_hash": "abc",
    "prompt_ids": [1, 2],
    "reused_tokens": 0,
    "context": 99,
    "settings": {},
    "seed": 0,
    "versions": {},
    "device": "cpu",
    "dtype": "float32",
}
PASS: dict[str, Any] = {
    "record": "pass",
    "mode": "denoise",
    "block": 0,
    "start": 2,
    "pass": 0,
    "block_before": [9, 9],
    "controls": {},
    "fixed": [
        {"row": 1, "token": 5, "confidence": 0.5, "reason": "surest", "top": [[5, 0.5], [6, 0.1]]}
    ],
    "coreset_sizes": [],
    "milliseconds": 1.5,
}
END: dict[str, Any] = {"record": "end", "finish_reason": "stop", "token_ids": [7, 5], "stats": {}}


def written(folder: Path, *lines: object) -> Path:
    path = folder / "trace.jsonl"
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")
    return path


def test_every_run_has_its_header_its_passes_and_its_end(tmp_path: Path) -> None:
    first, second = read_runs(written(tmp_path, HEADER, PASS, PASS, END, HEADER, PASS))
    assert (first.header.prompt_ids, first.header.context) == ((1, 2), 99)
    assert [step.number for step in first.steps] == [0, 0]
    assert first.steps[0].picked[0].top == ((5, 0.5), (6, 0.1))
    assert (first.finish_reason, first.token_ids, first.ended) == ("stop", (7, 5), True)
    assert (second.finish_reason, second.ended) == (None, False)


def test_choices_of_auto_stand_between_passes(tmp_path: Path) -> None:
    choice = choice_record(mode="denoise", is_probe=True, at=0, why="not measured yet")
    (run,) = read_runs(written(tmp_path, HEADER, choice, PASS, choice, PASS, END))
    assert (len(run.steps), run.ended) == (2, True)


def test_a_trace_of_an_earlier_version_is_read(tmp_path: Path) -> None:
    old = {key: value for key, value in HEADER.items() if key not in ("model", "dtype")}
    (run,) = read_runs(written(tmp_path, old, PASS))
    assert (run.header.model, run.header.dtype) == ("", None)


@pytest.mark.parametrize(
    "lines",
    [
        (PASS,),
        (HEADER, '{"record": "pa'),
        (HEADER, "[]"),
        (HEADER, {"record": "party"}),
        (HEADER, {**PASS, "block": "0"}),
        (HEADER, {**PASS, "fixed": 3}),
        (HEADER, {**PASS, "mode": "zz"}),
        (HEADER, {**PASS, "fixed": [[1]]}),
        (HEADER, {**PASS, "milliseconds": None}),
        (HEADER, {key: value for key, value in PASS.items() if key != "pass"}),
        ({**HEADER, "prompt_ids": [-1]},),
        ({**HEADER, "settings": []},),
        ("[" * 100_000,),
    ],
    ids=[
        "no-header", "cut-off", "list", "kind", "text", "number", "mode", "row", "null",
        "missing", "ids", "settings", "deep",
    ],
)  # fmt: skip
def test_a_damaged_trace_is_one_sentence_with_its_line(
    tmp_path: Path, lines: tuple[object, ...]
) -> None:
    with pytest.raises(TraceError, match=f"line {len(lines)} is no record") as caught:
        read_runs(written(tmp_path, *lines))
    assert "\n" not in str(caught.value)


def test_what_is_no_trace_is_said(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="is empty"):
        read_runs(written(tmp_path))
    for path in (tmp_path, tmp_path / "absent"):
        with pytest.raises(TraceError, match="cannot be read"):
            read_runs(path)
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(TraceError, match="it is no text"):
        read_runs(tmp_path / "binary")
