"""Reads from files that are kept open, also when something happens to these."""

import errno
import os
from pathlib import Path

import pytest

from clover_local.errors import CheckpointError
from clover_local.experts.files import Files


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    path.write_bytes(bytes(range(100)))
    return path


def test_bytes_come_from_anywhere_in_the_file(weights: Path) -> None:
    into = bytearray(7)
    files = Files([weights])
    for start in (90, 0, 13):
        files.read(weights, start, into=memoryview(into))
        assert into == bytes(range(start, start + 7))


def test_a_system_without_positioned_reads_gives_the_same(
    weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "preadv", raising=False)
    into = bytearray(7)
    Files([weights]).read(weights, 13, into=memoryview(into))
    assert into == bytes(range(13, 20))


def test_a_file_that_was_deleted_is_read_on(weights: Path) -> None:
    files, into = Files([weights]), bytearray(3)
    weights.unlink()
    files.read(weights, 5, into=memoryview(into))
    assert into == bytes((5, 6, 7))


def test_a_file_truncated_while_open_is_one_clear_line(weights: Path) -> None:
    files = Files([weights])
    os.truncate(weights, 10)
    with pytest.raises(CheckpointError, match="ends too early, it was changed while in use") as e:
        files.read(weights, 8, into=memoryview(bytearray(4)))
    assert "\n" not in str(e.value) and str(weights) in str(e.value)


def test_a_disk_error_is_one_clear_line(weights: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = Files([weights])

    def broken(file: object, start: int, into: memoryview) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(files, "_read", broken)
    with pytest.raises(CheckpointError, match=r"cannot be read \(Input/output error\): check"):
        files.read(weights, 0, into=memoryview(bytearray(4)))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="No such file"):
        Files([tmp_path / "absent"])
