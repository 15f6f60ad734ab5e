"""`clover-local ls` and `rm`, on a cache as the hub's client leaves it."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

Call = Callable[..., Any]
OLD, NEW = "0" * 40, "1" * 40


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache with a model in two revisions that share a file, and one without weights."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    put(tmp_path / "hub", "ours/clover", OLD, {"config.json": "c", "model.safetensors": "old"})
    put(tmp_path / "hub", "ours/clover", NEW, {"config.json": "c", "model.safetensors": "newer"})
    put(tmp_path / "hub", "theirs/other", OLD, {"config.json": "{}"})
    return tmp_path / "hub"


def put(cache: Path, repository: str, revision: str, files: dict[str, str]) -> None:
    root = cache / f"models--{repository.replace('/', '--')}"
    snapshot = root / "snapshots" / revision
    for folder in (root / "refs", root / "blobs", snapshot):
        folder.mkdir(parents=True, exist_ok=True)
    (root / "refs" / "main").write_text(revision, encoding="utf-8")
    for name, content in files.items():
        blob = root / "blobs" / content.strip("{}").rjust(4, "x")
        blob.write_text(content, encoding="utf-8")
        (snapshot / name).symlink_to(blob)


def test_every_revision_is_listed(run: Call, cache: Path) -> None:
    outcome = run("ls")
    assert outcome.code == 0
    rows = outcome.out.splitlines()[1:]
    assert sum("ours/clover" in row for row in rows) == 2
    assert sum("@11111111 main" in row for row in rows) == 1
    (other,) = [row for row in rows if "theirs/other" in row]
    assert other.endswith("no weights")
    listed = json.loads(run("ls", "--json").out)["models"]
    assert {(each["name"], each["revision"][0], each["bytes"]) for each in listed} == {
        ("ours/clover", "0", 4),
        ("ours/clover", "1", 6),
        ("theirs/other", "0", 2),
    }


def test_an_absent_cache_is_empty(run: Call, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "absent"))
    assert "no model" in run("ls").out
    outcome = run("rm", "a/b", "--yes")
    assert (outcome.code, outcome.err.count("\n")) == (1, 1)
    assert "there are none" in outcome.err


def test_a_revision_is_removed_and_what_others_share_stays(run: Call, cache: Path) -> None:
    outcome = run("rm", "ours/clover@0000", "--yes")
    assert (outcome.code, outcome.out) == (0, "freed 3 B\n")
    snapshots = cache / "models--ours--clover" / "snapshots"
    assert [path.name for path in snapshots.iterdir()] == [NEW]
    assert (snapshots / NEW / "config.json").read_text() == "c"
    assert run("rm", "ours/clover", "--yes").code == 0
    assert not (cache / "models--ours--clover").exists()
    other = cache / "models--theirs--other" / "snapshots" / OLD  # of the same hash
    assert (other / "config.json").exists()


def test_nothing_is_removed_unasked(run: Call, cache: Path) -> None:
    outcome = run("rm", "ours/clover", stdin=b"")
    assert outcome.code == 1
    assert "pass --yes" in outcome.err.splitlines()[-1]
    assert len(json.loads(run("ls", "--json").out)["models"]) == 3


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("demo", "part of the package"),
        (".", "remove it yourself"),
        ("ours/cloves", "there are ours/clover, theirs/other"),
        ("ours/clover@9", "not in the hub cache"),
    ],
)
def test_what_is_not_in_the_cache_is_refused(run: Call, cache: Path, name: str, words: str) -> None:
    outcome = run("rm", name, "--yes")
    assert (outcome.code, outcome.out, outcome.err.count("\n")) == (1, "", 1)
    assert words in outcome.err


def test_ls_does_not_load_torch() -> None:
    code = (
        "import sys; from clover_local.cli.app import main\n"
        "sys.argv = ['clover-local', 'ls']; main(); sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
