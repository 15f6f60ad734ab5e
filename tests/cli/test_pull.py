"""`clover-local pull`, from a small hub on this machine: stops, damage, refusals."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import httpx2
import pytest
from huggingface_hub import constants

from clover_local.errors import HubError
from clover_local.fetch import pull
from clover_local.fetch.remote import find
from clover_local.hub import find_cached, locate

Call = Callable[..., Any]
WEIGHTS = bytes(range(256)) * 4096  # 1 MiB
HALF = len(WEIGHTS) // 2


@pytest.fixture
def filled(hub: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A hub whose model has one file of weights; retries do not wait."""
    hub.put("config.json", b"{}")
    hub.put("tokenizer.json", b"{ }")
    hub.put("model.safetensors", WEIGHTS)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    return hub


def names(hub: Any) -> list[str]:
    """The files that were sent, as often as they were."""
    return [name for name, _ in hub.asked]


def test_a_model_is_fetched_checked_and_found_by_its_name(run: Call, filled: Any) -> None:
    outcome = run("pull", "owner/name")
    assert outcome.code == 0
    assert outcome.out == f"{filled.snapshot}: 1.05 MB, all hashes agree\n"
    assert "3 files, 1.05 MB; 1.05 MB to fetch" in outcome.err.splitlines()[0]
    assert "free on the disk of" in outcome.err.splitlines()[0]
    assert (filled.snapshot / "model.safetensors").read_bytes() == WEIGHTS
    assert locate("owner/name") == filled.snapshot
    assert find_cached("owner/name")[0].refs == ("main",)
    assert not list(filled.blobs.glob("*.incomplete"))


def test_what_is_there_is_checked_and_not_fetched_again(run: Call, filled: Any) -> None:
    run("pull", "owner/name")
    filled.asked.clear()
    outcome = run("pull", "owner/name")
    assert (outcome.code, filled.asked) == (0, [])
    assert "0 B to fetch" in outcome.err
    assert "fetching" not in outcome.err


def test_neither_pickle_nor_code_is_fetched(run: Call, filled: Any) -> None:
    filled.put("pytorch_model.bin", b"pickle")
    filled.put("modeling.py", b"code")
    outcome = run("pull", "owner/name")
    assert outcome.code == 0
    assert sorted(names(filled)) == ["config.json", "model.safetensors", "tokenizer.json"]
    assert "note: not fetched: pytorch_model.bin" in outcome.err
    refused = run("pull", "owner/name", "--include", "*.bin")
    assert refused.code == 1
    assert "has no file like *.bin" in refused.err


def test_a_model_in_other_formats_alone_is_refused(run: Call, hub: Any) -> None:
    hub.put("config.json", b"{}")
    hub.put("pytorch_model.bin", b"pickle")
    outcome = run("pull", "owner/name")
    assert (outcome.code, outcome.err.count("\n")) == (1, 1)
    assert "other formats may run code" in outcome.err


def test_json_is_one_object_alone_on_stdout(run: Call, filled: Any) -> None:
    outcome = run("pull", "owner/name", "--json")
    shown = json.loads(outcome.out)
    assert shown["revision"] == filled.commit
    assert shown["bytes"] == shown["fetched_bytes"] == len(WEIGHTS) + 5
    assert {file["name"] for file in shown["files"]} == set(filled.files)
    assert run("pull", "owner/name", "--json", "--quiet").err == ""


def test_a_cut_connection_is_taken_up_where_it_broke(run: Call, filled: Any) -> None:
    filled.cuts = [HALF, 70_000]
    assert run("pull", "owner/name").code == 0
    ranges = [asked for name, asked in filled.asked if name == "model.safetensors"]
    assert ranges[0] is None
    starts = [int(str(asked).removeprefix("bytes=").rstrip("-")) for asked in ranges[1:]]
    assert len(starts) == 2
    assert 0 < starts[0] <= HALF
    assert starts[0] < starts[1] <= starts[0] + 70_000
    assert (filled.snapshot / "model.safetensors").read_bytes() == WEIGHTS


def test_a_connection_that_stays_broken_stops_and_the_next_call_continues(
    run: Call, filled: Any
) -> None:
    filled.cuts = [HALF] + [0] * pull.TRIES
    outcome = run("pull", "owner/name", "--quiet")
    assert (outcome.code, outcome.out, outcome.err.count("\n")) == (1, "", 1)
    assert "the download of owner/name stopped (" in outcome.err
    assert outcome.err.endswith("run again to continue it\n")
    assert not filled.snapshot.exists()  # nobody takes half a model for a whole one
    (part,) = filled.blobs.glob("*.incomplete")
    kept = part.stat().st_size
    filled.cuts, filled.asked = [], []
    outcome = run("pull", "owner/name")
    assert outcome.code == 0
    assert HALF - 70_000 < kept <= HALF
    assert f"{(len(WEIGHTS) - kept) / 1000:.0f} kB to fetch" in outcome.err
    assert ("model.safetensors", f"bytes={kept}-") in filled.asked


def test_a_hub_that_sends_more_than_it_says_does_not_fill_the_disk(run: Call, filled: Any) -> None:
    filled.surplus = 3 * len(WEIGHTS)
    outcome = run("pull", "owner/name", "--json")
    assert outcome.code == 0, outcome.err
    assert json.loads(outcome.out)["fetched_bytes"] == len(WEIGHTS) + 5
    assert (filled.snapshot / "model.safetensors").read_bytes() == WEIGHTS


def test_a_part_that_the_hub_does_not_continue_is_fetched_from_its_start(filled: Any) -> None:
    remote = find("owner/name", None, include=["*.safetensors"])
    part = remote.part(remote.files[0])
    part.parent.mkdir(parents=True)
    part.write_bytes(WEIGHTS[:HALF])
    filled.refusals = [(416, "")]
    assert pull.fetch(remote) == len(WEIGHTS)
    assert filled.asked == [("model.safetensors", None)]


def test_a_server_that_sends_the_whole_file_again_is_understood(run: Call, filled: Any) -> None:
    filled.cuts, filled.keeps_ranges = [HALF], False
    assert run("pull", "owner/name").code == 0
    assert (filled.snapshot / "model.safetensors").read_bytes() == WEIGHTS


def test_a_whole_part_that_got_no_name_is_not_fetched_again(run: Call, filled: Any) -> None:
    filled.blobs.mkdir(parents=True)
    part = filled.blobs / f"{filled.hash('model.safetensors')}.incomplete"
    part.write_bytes(WEIGHTS)
    assert run("pull", "owner/name").code == 0
    assert "model.safetensors" not in names(filled)


def test_a_half_fetched_model_is_listed_and_can_be_removed(run: Call, filled: Any) -> None:
    filled.cuts = [HALF] + [0] * pull.TRIES
    run("pull", "owner/name")
    (row,) = run("ls").out.splitlines()[1:]
    assert row.split()[0] == "owner/name"
    assert row.endswith("half fetched: pull continues")
    listed = json.loads(run("ls", "--json").out)
    assert (listed["models"], listed["half_fetched"][0]["name"]) == ([], "owner/name")
    removed = json.loads(run("rm", "owner/name", "--yes", "--json").out)
    assert removed["removed"] == ["owner/name"]
    assert removed["freed_bytes"] == listed["half_fetched"][0]["bytes"] > 0
    assert "no model" in run("ls").out


def test_damage_on_the_way_is_fetched_again(run: Call, filled: Any) -> None:
    filled.wrong = 1
    assert run("pull", "owner/name").code == 0
    assert names(filled).count("model.safetensors") == 2
    assert (filled.snapshot / "model.safetensors").read_bytes() == WEIGHTS


def test_damage_twice_is_an_error_and_nothing_damaged_stays(run: Call, filled: Any) -> None:
    filled.wrong = 2
    outcome = run("pull", "owner/name", "--quiet")
    assert (outcome.code, outcome.err.count("\n")) == (1, 1)
    assert "model.safetensors of owner/name came damaged twice" in outcome.err
    assert not list(filled.blobs.glob("*.incomplete"))
    assert run("pull", "owner/name").code == 0


def test_a_damaged_part_of_an_earlier_run_is_noticed(run: Call, filled: Any) -> None:
    filled.blobs.mkdir(parents=True)
    part = filled.blobs / f"{filled.hash('model.safetensors')}.incomplete"
    part.write_bytes(b"x" * HALF)
    assert run("pull", "owner/name").code == 0
    assert [asked for name, asked in filled.asked if name == "model.safetensors"] == [
        f"bytes={HALF}-",
        None,
    ]
    assert (filled.snapshot / "model.safetensors").read_bytes() == WEIGHTS


def test_a_file_that_was_damaged_on_the_disk_is_named_and_fetched_again(
    run: Call, filled: Any
) -> None:
    run("pull", "owner/name")
    blob = filled.blobs / filled.hash("model.safetensors")
    blob.write_bytes(WEIGHTS[:-1] + b"x")
    filled.asked.clear()
    outcome = run("pull", "owner/name")
    assert "note: model.safetensors: damaged on the disk, fetched again" in outcome.err
    assert names(filled) == ["model.safetensors"]
    assert (filled.snapshot / "model.safetensors").read_bytes() == WEIGHTS


class Usage(NamedTuple):
    """As of shutil.disk_usage."""

    total: int
    used: int
    free: int


def test_a_disk_without_room_is_refused_before_a_byte_is_fetched(
    run: Call, filled: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10, 10, 1000))
    outcome = run("pull", "owner/name", "--quiet")
    assert (outcome.code, outcome.err.count("\n")) == (1, 1)
    assert "needs 1.05 MB more on the disk" in outcome.err
    assert "which has 1.00 kB free: free 1.05 MB, or set HF_HOME" in outcome.err
    assert filled.asked == []


def test_only_what_is_missing_needs_room(
    run: Call, filled: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled.blobs.mkdir(parents=True)
    part = filled.blobs / f"{filled.hash('model.safetensors')}.incomplete"
    part.write_bytes(WEIGHTS[:-500])
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10, 10, 1000))
    assert run("pull", "owner/name").code == 0


def test_a_disk_that_fills_meanwhile_is_one_line_and_keeps_what_came(
    run: Call, filled: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = httpx2.Response.iter_bytes

    def full(response: httpx2.Response, *size: int) -> Any:
        if "resolve" not in str(response.request.url):
            yield from whole(response, *size)
            return
        yield b"abc"
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(httpx2.Response, "iter_bytes", full)
    outcome = run("pull", "owner/name", "--include", "*.safetensors", "--quiet")
    assert (outcome.code, outcome.err.count("\n")) == (1, 1)
    assert "No space left on device" in outcome.err
    assert "free some space, and run again to continue it" in outcome.err
    (part,) = filled.blobs.glob("*.incomplete")
    assert part.read_bytes() == b"abc"


def test_a_gate_at_the_files_is_noticed_too(run: Call, filled: Any) -> None:
    remote = find("owner/name", None)
    filled.refusals = [(403, "GatedRepo")]
    with pytest.raises(HubError, match="is gated"):
        pull.fetch(remote, pause=0)


def test_a_fault_of_the_server_that_passes_is_waited_for(run: Call, filled: Any) -> None:
    remote = find("owner/name", None)
    filled.refusals = [(503, ""), (502, "")]
    assert pull.fetch(remote, pause=0) == remote.nbytes


def test_the_token_goes_with_every_request(
    run: Call, filled: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled.token = "hf_secret"
    assert run("pull", "owner/name").code == 1
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    assert run("pull", "owner/name").code == 0


def test_a_revision_is_kept_under_its_name(run: Call, filled: Any) -> None:
    assert run("pull", "owner/name", "--revision", "v2").code == 0
    assert locate("owner/name@v2") == filled.snapshot


def test_offline_and_no_network_are_one_line_each(
    run: Call, filled: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    outcome = run("pull", "owner/name")
    assert outcome.err == (
        "error: HF_HUB_OFFLINE is set, so the hub is not asked for owner/name: unset it\n"
    )
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    outcome = run("pull", "owner/name")
    assert (outcome.code, outcome.err.count("\n")) == (1, 1)
    assert outcome.err.startswith("error: http://127.0.0.1:9 cannot be reached (")


def test_of_several_gguf_models_one_is_named_and_then_runs_by_its_id(run: Call, hub: Any) -> None:
    for name in ("x-Q4_K_M.gguf", "x-Q8_0.gguf", "mmproj-F16.gguf"):
        hub.put(name, name.encode())
    outcome = run("pull", "owner/name")
    assert outcome.code == 1
    assert "2 models in .gguf files (x-Q4_K_M.gguf, x-Q8_0.gguf): say which" in outcome.err
    assert run("pull", "owner/name", "--include", "x-Q8*").code == 0
    assert locate("owner/name") == hub.snapshot / "x-Q8_0.gguf"


def test_two_files_of_one_content_are_fetched_and_mended_once(run: Call, filled: Any) -> None:
    filled.put("again.safetensors", WEIGHTS)
    outcome = run("pull", "owner/name", "--json")
    assert json.loads(outcome.out)["bytes"] == json.loads(outcome.out)["fetched_bytes"]
    assert sum(name.endswith(".safetensors") for name in names(filled)) == 1
    assert (filled.snapshot / "again.safetensors").read_bytes() == WEIGHTS
    (filled.blobs / filled.hash("model.safetensors")).write_bytes(WEIGHTS[:-1] + b"x")
    outcome = run("pull", "owner/name", "--json")
    assert outcome.code == 0, outcome.err
    assert set(json.loads(outcome.out)["damaged"]) == {"model.safetensors", "again.safetensors"}
    assert (filled.snapshot / "again.safetensors").read_bytes() == WEIGHTS


def test_room_is_needed_once_for_two_files_of_one_content(
    run: Call, filled: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled.put("again.safetensors", WEIGHTS)
    room = len(WEIGHTS) + 1000
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(room, 0, room))
    assert run("pull", "owner/name").code == 0


def test_the_hash_of_what_came_is_counted_while_it_is_computed(filled: Any) -> None:
    remote = find("owner/name", None)
    checked: list[tuple[str, int, int]] = []
    pull.fetch(remote, on_check=lambda *step: checked.append(step))
    assert ("model.safetensors", len(WEIGHTS), len(WEIGHTS)) in checked
    assert {name for name, *_ in checked} == set(filled.files)


def test_pull_does_not_load_torch(filled: Any, run: Call) -> None:
    code = (
        "import sys; from clover_local.cli.app import main\n"
        "sys.argv = ['clover-local', 'pull', 'owner/name']\n"
        "sys.exit(main() or 'torch' in sys.modules)"
    )
    environment = {**os.environ, "HF_HOME": str(filled.cache.parent), "HF_ENDPOINT": filled.url}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
