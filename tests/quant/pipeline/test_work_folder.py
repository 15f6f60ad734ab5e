"""The destination folder: what may lie there, the lock, the last renames."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from clover_local.config import UNFINISHED_NAME
from clover_local.errors import CheckpointError
from clover_local.quant.pipeline.manifest import MADE_FROM, Manifest
from clover_local.quant.pipeline.work_folder import REPORT_NAME, WorkFolder, check_apart

MANIFEST = Manifest(source={"a": "1"}, arguments={"method": "gptq"}, calibration="")
OTHER = replace(MANIFEST, arguments={"method": "rtn"})


@pytest.fixture
def place(tmp_path: Path) -> WorkFolder:
    return WorkFolder(tmp_path / "deep" / "result")


def finished(place: WorkFolder, manifest: Manifest = MANIFEST) -> None:
    place.destination.mkdir(parents=True)
    (place.destination / "config.json").write_text("{}")
    report = {MADE_FROM: manifest.to_json()}
    (place.destination / REPORT_NAME).write_text(json.dumps(report))


@pytest.mark.parametrize("folder", ["", "inside", "inside/deeper"], ids=["same", "in", "deep"])
def test_source_and_destination_are_apart(tmp_path: Path, folder: str) -> None:
    outer, inner = tmp_path / "folder", tmp_path / "folder" / folder
    (outer / "inside").mkdir(parents=True)
    with pytest.raises(CheckpointError, match="use another folder"):
        check_apart(outer, inner)
    with pytest.raises(CheckpointError, match="use another folder"):
        check_apart(inner, outer)


def test_links_do_not_hide_that_they_are_one(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "source")
    with pytest.raises(CheckpointError, match="inside the source"):
        check_apart(tmp_path / "source", tmp_path / "link" / "result")


def test_neighbours_are_apart(tmp_path: Path) -> None:
    check_apart(tmp_path / "model", tmp_path / "model-int4")


def test_new_and_empty_folders_are_welcome(place: WorkFolder) -> None:
    place.check_foreign()
    assert not place.is_finished(MANIFEST)
    place.destination.mkdir(parents=True)
    place.check_foreign()
    place.check_unfinished(MANIFEST)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("config.json", "holds another checkpoint"),
        ("notes.txt", r"holds other files \(notes.txt\)"),
        (".hidden", r"holds other files \(.hidden\)"),
    ],
)
def test_what_others_left_is_refused(place: WorkFolder, name: str, message: str) -> None:
    place.destination.mkdir(parents=True)
    (place.destination / name).write_text("{}")
    with pytest.raises(CheckpointError, match=message):
        place.check_foreign()


def test_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="file is no folder: use another one"):
        WorkFolder(tmp_path / "file").check_foreign()


def test_finished_result_is_known_by_its_report(place: WorkFolder) -> None:
    finished(place)
    place.check_foreign()
    assert place.is_finished(MANIFEST)
    with pytest.raises(CheckpointError, match=r"was made with method gptq, not rtn: use another"):
        place.is_finished(OTHER)


def test_report_of_something_else_is_refused(place: WorkFolder) -> None:
    finished(place)
    (place.destination / REPORT_NAME).write_text("{}")
    with pytest.raises(CheckpointError, match="holds another checkpoint"):
        place.is_finished(MANIFEST)


def test_unfinished_work_is_continued_only_with_its_own_manifest(place: WorkFolder) -> None:
    with place.locked():
        place.manifest.write_text(json.dumps(MANIFEST.to_json()))
    (place.destination / "model-00001-of-00002.safetensors").write_bytes(b"")
    place.check_foreign()
    place.check_unfinished(MANIFEST)
    with pytest.raises(CheckpointError, match="method gptq, not rtn"):
        place.check_unfinished(OTHER)


def test_second_process_is_refused(place: WorkFolder) -> None:
    with place.locked():
        second = WorkFolder(place.destination)
        with pytest.raises(CheckpointError, match="another process is quantizing"), second.locked():
            pass
    with WorkFolder(place.destination).locked():
        pass


def test_lock_on_a_file_that_is_gone_counts_for_nothing(
    place: WorkFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = place.root / "lock"
    monkeypatch.setattr("fcntl.flock", lambda file, how: lock.unlink())
    with pytest.raises(CheckpointError, match="another process"), place.locked():
        pass


def test_finish_renames_config_last_and_leaves_nothing_else(
    place: WorkFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    renamed: list[str] = []
    rename = Path.rename

    def record(self: Path, target: Path) -> Path:
        renamed.append(self.name)
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", record)
    with place.locked():
        for name in ("config.json", "a.safetensors", REPORT_NAME, "tokenizer.json"):
            (place.output / name).write_text(name)
        place.finish()
    assert renamed[-1] == "config.json"
    assert sorted(path.name for path in place.destination.iterdir()) == sorted(renamed)
    assert not (place.destination / UNFINISHED_NAME).exists()


def test_room_on_the_disk_is_checked_less_what_is_there(place: WorkFolder) -> None:
    with place.locked():
        (place.output / "shard").write_bytes(b"x" * 1000)
        place.require_room(1000)
        with pytest.raises(
            CheckpointError, match=r"bytes more, and its disk has .* free: make room"
        ):
            place.require_room(1 << 60)
