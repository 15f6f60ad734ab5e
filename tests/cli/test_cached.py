"""`clover-local ls` and `rm`, on a cache as the hub's client leaves it."""

import json
import os
import shutil
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


def break_link(root: Path) -> None:
    (root / "snapshots" / OLD / "config.json").unlink()
    (root / "snapshots" / OLD / "config.json").symlink_to("../../blobs/absent")


def break_ref(root: Path) -> None:
    (root / "refs" / "main").write_text("9" * 40, encoding="utf-8")


def empty(root: Path) -> None:
    shutil.rmtree(root)
    root.mkdir()


def make_file(root: Path) -> None:
    shutil.rmtree(root)
    root.touch()


def make_link_to_nothing(root: Path) -> None:
    shutil.rmtree(root)
    root.symlink_to("absent")


@pytest.mark.parametrize("damage", [break_link, break_ref, empty, make_file, make_link_to_nothing])
def test_what_is_damaged_is_listed_and_can_be_removed(
    run: Call, cache: Path, damage: Callable[[Path], None]
) -> None:
    root = cache / "models--theirs--other"
    damage(root)
    (row,) = [row for row in run("ls").out.splitlines() if "theirs/other" in row]
    assert row.endswith("damaged: rm removes it")
    listed = json.loads(run("ls", "--json").out)
    assert [each["name"] for each in listed["damaged"]] == ["theirs/other"]
    assert {each["name"] for each in listed["models"]} == {"ours/clover"}
    assert "there are ours/clover, theirs/other" in run("rm", "a/b", "--yes").err
    outcome = run("rm", "theirs/other", "--yes", "--json")
    assert outcome.code == 0, outcome.err
    assert json.loads(outcome.out)["freed_bytes"] == listed["damaged"][0]["bytes"]
    assert not os.path.lexists(root)
    assert json.loads(run("ls", "--json").out)["damaged"] == []


@pytest.mark.parametrize("damage", [None, break_ref], ids=["whole", "damaged"])
def test_of_a_model_that_is_a_link_the_link_is_removed_and_its_files_stay(
    run: Call, cache: Path, tmp_path: Path, damage: Callable[[Path], None] | None
) -> None:
    root, elsewhere = cache / "models--theirs--other", tmp_path / "elsewhere"
    root.rename(elsewhere)
    root.symlink_to(elsewhere)
    if damage:
        damage(elsewhere)
    before = sorted(elsewhere.rglob("*"))
    outcome = run("rm", "-y", "theirs/other")
    assert (outcome.code, outcome.out) == (0, "freed 0 B\n"), outcome.err
    assert not os.path.lexists(root)
    assert sorted(elsewhere.rglob("*")) == before


@pytest.mark.parametrize(
    "command", [("ls",), ("ls", "--json"), ("rm", "a/b", "--yes")], ids=" ".join
)
def test_a_cache_that_is_a_file_is_one_line_with_the_remedy(
    run: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    (tmp_path / "hub").touch()
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    outcome = run(*command)
    assert (outcome.code, outcome.out, outcome.err.count("\n")) == (1, "", 1)
    assert "is no folder: set HF_HOME to one, or move that file away" in outcome.err


def test_what_may_not_be_removed_is_an_error_and_nothing_is_said_to_be_free(
    run: Call, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(path: Path, *arguments: object, **others: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(shutil, "rmtree", refused)
    for name in ("ours/clover", "theirs/other"):
        outcome = run("rm", name, "--yes", "--quiet")
        assert (outcome.code, outcome.out) == (1, "")
        assert "cannot be removed (Permission denied): check its perm" in outcome.err
        break_ref(cache / "models--theirs--other")


def test_ls_does_not_load_torch() -> None:
    code = (
        "import sys; from clover_local.cli.app import main\n"
        "sys.argv = ['clover-local', 'ls']; main(); sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
