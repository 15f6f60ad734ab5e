"""`clover-local pull` beside another process that fetches, and after one that was killed."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest

from clover_local.fetch import pull
from clover_local.fetch.remote import find
from clover_local.hub import blob_lock, find_cached, locate

Call = Callable[..., Any]
WEIGHTS = bytes(range(256)) * 4096  # 1 MiB
HALF = len(WEIGHTS) // 2


@pytest.fixture
def filled(hub: Any) -> Any:
    """A hub whose model has one file of weights."""
    hub.put("config.json", b"{}")
    hub.put("tokenizer.json", b"{ }")
    hub.put("model.safetensors", WEIGHTS)
    return hub


def test_who_waits_for_another_process_says_so_and_goes_on_when_it_has_ended(
    run: Call, filled: Any
) -> None:
    remote = find("owner/name", None, include=["*.safetensors"])
    lock = blob_lock(remote.root, filled.hash("model.safetensors"))
    waited: list[str] = []

    def end_the_other(name: str) -> None:
        waited.append(name)
        lock.release()

    lock.acquire()
    assert pull.fetch(remote, on_wait=end_the_other) == len(WEIGHTS)
    assert waited == ["model.safetensors"]


def test_names_are_given_by_one_process_at_a_time(filled: Any) -> None:
    remote = find("owner/name", None)
    lock = blob_lock(remote.root, "names")
    waited: list[str] = []

    def end_the_other(name: str) -> None:
        waited.append(name)
        assert not (remote.root / "refs").exists()
        lock.release()

    lock.acquire()
    pull.fetch(remote, on_wait=end_the_other)
    assert waited == ["the same model"]
    assert locate("owner/name") == filled.snapshot


def test_two_programs_fetch_one_model_at_once(filled: Any) -> None:
    environment = {**os.environ, "HF_HOME": str(filled.cache.parent), "HF_ENDPOINT": filled.url}
    command = [sys.executable, "-m", "clover_local", "pull", "owner/name", "--json", "--quiet"]
    pulls = [
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for _ in range(2)
    ]
    ended = [(*each.communicate(timeout=60), each.returncode) for each in pulls]
    assert [(err, code) for _, err, code in ended] == [(b"", 0)] * 2
    assert sum(json.loads(out)["fetched_bytes"] for out, *_ in ended) == len(WEIGHTS) + 5
    assert sorted(name for name, _ in filled.asked) == sorted(filled.files)
    assert [path.name for path in (filled.blobs.parent / "refs").iterdir()] == ["main"]
    assert find_cached("owner/name")[0].refs == ("main",)


def test_what_a_pull_is_fetching_is_not_removed_and_then_is_by_any_of_its_names(
    run: Call, filled: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    filled.cuts = [HALF] + [0] * pull.TRIES
    run("pull", "owner/name")
    root = filled.blobs.parent
    with blob_lock(root, filled.hash("model.safetensors")):
        outcome = run("rm", "owner/name", "--yes")
        assert outcome.code == 1
        assert "a pull is fetching owner/name just now: stop it" in outcome.err
        assert list(filled.blobs.glob("*.incomplete"))
    assert "there are owner/name" in run("rm", "owner/nam", "--yes").err
    assert run("rm", "owner/name@main", "--yes").code == 0
    assert not root.exists()


@pytest.mark.skipif(os.name != "posix", reason="needs signals")
@pytest.mark.parametrize("signal_number", [signal.SIGKILL, signal.SIGINT], ids=["kill", "Ctrl-C"])
def test_a_stopped_program_is_continued_by_the_same_command(
    hub: Any, signal_number: signal.Signals
) -> None:
    hub.put("config.json", b"{}")
    hub.put("model.safetensors", WEIGHTS * 4)
    hub.pause = 0.02
    environment = {
        **os.environ,
        "HF_HOME": str(hub.cache.parent),
        "HF_ENDPOINT": hub.url,
        "PYTHONSAFEPATH": "1",
    }
    command = [sys.executable, "-m", "clover_local", "pull", "owner/name"]
    first = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    part = hub.blobs / f"{hub.hash('model.safetensors')}.incomplete"
    while not part.exists() or part.stat().st_size < HALF:
        assert first.poll() is None
        time.sleep(0.01)
    first.send_signal(signal_number)
    _, err = first.communicate(timeout=60)
    if signal_number == signal.SIGINT:
        assert first.returncode == 130
        assert err.endswith("stopped: what was fetched is kept, and the same command continues\n")
    kept, hub.pause = part.stat().st_size, 0.0
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert ("model.safetensors", f"bytes={kept}-") in hub.asked
    assert (hub.snapshot / "model.safetensors").read_bytes() == WEIGHTS * 4
