"""The trace file itself; what a whole run writes is in test_generate.py."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from clover_local.decoding.trace import Trace, header_record
from clover_local.errors import CloverError, SettingsError
from clover_local.generate import generate

if TYPE_CHECKING:
    from tests.decoding.conftest import Scripted


@dataclass
class Heard:
    """A sink that keeps nothing."""

    model: str = "demo"
    model_hash: str = "abc"

    def write(self, record: Mapping[str, object]) -> None: ...


@pytest.mark.parametrize("name", ["missing/trace.jsonl", "."], ids=["no-folder", "a-folder"])
def test_unwritable_path_is_refused_before_any_work(tmp_path: Path, name: str) -> None:
    with pytest.raises(SettingsError, match=r"cannot be written .*--trace FILE"):
        Trace(tmp_path / name, model_hash="abc")


def test_full_disk_is_one_clear_error() -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("no /dev/full here")
    with pytest.raises(SettingsError, match="No space left"):
        Trace(full, model_hash="abc").write({"record": "header"})


def test_records_are_lines_that_are_on_disk_at_once(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    with Trace(path, model_hash="abc") as trace:
        trace.write({"record": "pass", "text": "\u00e9\n"})
        assert [json.loads(line)["text"] for line in path.open(encoding="utf-8")] == ["\u00e9\n"]
    trace.write({"record": "late"})
    assert len(path.read_text(encoding="utf-8").splitlines()) == 1


def test_header_has_what_a_replay_needs(scripted: Scripted) -> None:
    settings = scripted.settings(seed=7, suppress=(3,))
    header = header_record(
        Heard(),
        settings,
        prompt_ids=(1, 2),
        reused_tokens=0,
        context=99,
        device=torch.device("cpu"),
        dtype=torch.bfloat16,
    )
    header = json.loads(json.dumps(header))
    assert header["seed"] == header["settings"]["seed"] == 7
    assert header["settings"]["suppress"] == [3]
    assert (header["prompt_ids"], header["context"], header["device"]) == ([1, 2], 99, "cpu")
    assert (header["model"], header["model_hash"], header["dtype"]) == ("demo", "abc", "bfloat16")
    assert set(header["versions"]) == {"clover_local", "torch", "python"}


def test_two_turns_are_two_runs_in_one_file(scripted: Scripted, tmp_path: Path) -> None:
    path, state = tmp_path / "trace.jsonl", scripted.state()
    settings = scripted.settings(max_new_tokens=2)
    with Trace(path, model_hash="abc") as trace:
        first = generate(scripted.model(), state, settings, [1], trace=trace)
        generate(scripted.model(), state, settings, [1, *first.token_ids, 9], trace=trace)
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    kinds = [record["record"] for record in records]
    assert kinds == ["header", "commit", "pass", "commit", "end"] * 2
    assert [r["reused_tokens"] for r in records if r["record"] == "header"] == [0, 3]
    assert records[2]["coreset_sizes"] == [2, 3]


def test_failed_run_says_so_in_its_last_record(scripted: Scripted, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    model = scripted.model(confidence=lambda p: float("nan"))
    with Trace(path, model_hash="abc") as trace, pytest.raises(CloverError, match="no numbers"):
        generate(model, scripted.state(), scripted.settings(), [1], trace=trace)
    last = json.loads(path.read_text(encoding="utf-8").splitlines()[-1])
    assert (last["record"], last["finish_reason"]) == ("end", "error")


def test_full_disk_is_said_once_and_closing_adds_nothing() -> None:
    with (
        pytest.raises(SettingsError, match="/dev/full cannot be written"),
        Trace(Path("/dev/full"), model_hash="") as trace,
    ):
        trace.write({"record": "header"})


def test_a_trace_stays_until_there_is_another(tmp_path: Path) -> None:
    path, fresh = tmp_path / "old.jsonl", tmp_path / "new.jsonl"
    with Trace(path, model_hash="x") as trace:
        trace.write({"record": "header", "n": 1})
    old = path.read_bytes()
    with suppress(ZeroDivisionError), Trace(path, model_hash="x"), Trace(fresh, model_hash="x"):
        raise ZeroDivisionError
    assert path.read_bytes() == old
    assert not fresh.exists()
    with Trace(path, model_hash="x") as trace:
        trace.write({"record": "header", "n": 2})
        assert path.read_text() == '{"record": "header", "n": 2}\n'


def test_a_file_that_is_no_trace_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"weights")
    with pytest.raises(SettingsError, match="is no trace"):
        Trace(path, model_hash="")
    assert path.read_bytes() == b"weights"


def test_a_trace_may_be_written_again(tmp_path: Path) -> None:
    for _ in range(2):
        with Trace(tmp_path / "t", model_hash="") as trace:
            trace.write({"record": "header"})
    assert (tmp_path / "t").read_text().count("\n") == 1
