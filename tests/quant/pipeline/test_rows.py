"""Rows in a file: read back exactly, whole or not there."""

from pathlib import Path

import pytest
import torch

from clover_local.errors import CheckpointError
from clover_local.quant.pipeline.rows import RowFile, RowFiles


def test_rows_are_read_back_in_any_runs(tmp_path: Path) -> None:
    rows = torch.randn(13, 5)
    file = RowFile(tmp_path / "a.rows", 5)
    with file.writer(durable=True) as writer:
        writer.append(rows[:6])
        writer.append(rows[6:7])
        writer.append(rows[7:].double())
    assert file.rows == 13
    assert torch.equal(file.read(0, 13), rows)
    assert torch.equal(file.read(5, 8), rows[5:8])
    assert file.read(4, 4).shape == (0, 5)


def test_name_is_there_only_once_all_rows_are(tmp_path: Path) -> None:
    file = RowFile(tmp_path / "a.rows", 5)
    with file.writer(durable=False) as writer:
        writer.append(torch.zeros(2, 5))
        assert not file.path.exists()
    assert file.path.exists()


def test_full_disk_leaves_no_file_and_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int, view: memoryview) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.write", full)
    file = RowFile(tmp_path / "a.rows", 5)
    with (
        pytest.raises(CheckpointError, match=r"\(No space left on device\): make room"),
        file.writer(durable=True) as writer,
    ):
        writer.append(torch.zeros(2, 5))
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("content", [None, b"12345678"], ids=["absent", "short"])
def test_damaged_file_is_an_error(tmp_path: Path, content: bytes | None) -> None:
    file = RowFile(tmp_path / "a.rows", 5)
    if content is not None:
        file.path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"a\.rows is damaged"):
        file.read(0, 3)


def test_removing_twice_is_no_error(tmp_path: Path) -> None:
    file = RowFile(tmp_path / "a.rows", 5)
    file.remove()
    file.path.write_bytes(b"")
    file.remove()
    assert not file.path.exists()


def test_rows_before_a_layer_have_names_of_their_own(tmp_path: Path) -> None:
    files = [RowFiles.before(layer, tmp_path, width=5) for layer in (0, 1)]
    paths = [path for each in files for path in each.paths]
    assert len(set(paths)) == 4
    for path in paths:
        path.write_bytes(b"")
    files[0].remove()
    files[0].remove()
    assert set(tmp_path.iterdir()) == files[1].paths
