"""Models in several files."""

import shutil
from pathlib import Path

import pytest

from clover_local.errors import CheckpointError
from clover_local.gguf.splits import read_gguf
from tests.gguf.conftest import WriteGguf

NAME = "m-{:05}-of-00003.gguf"


@pytest.fixture
def pieces(write_gguf: WriteGguf) -> list[Path]:
    """Three files with two tensors each."""
    return [
        write_gguf(
            NAME.format(number + 1),
            metadata={"split.no": number, "split.count": 3, "split.tensors.count": 6},
            shapes={f"{number}.a": (4,), f"{number}.b": (4,)},
        )
        for number in range(3)
    ]


def test_the_first_file_stands_for_all(pieces: list[Path]) -> None:
    model = read_gguf(pieces[0])
    assert [file.path for file in model.files] == pieces
    assert list(model.tensors) == ["0.a", "0.b", "1.a", "1.b", "2.a", "2.b"]
    assert model.tensors["2.b"].path == pieces[2]
    assert model.nbytes == sum(path.stat().st_size for path in pieces)


def test_another_file_than_the_first_is_refused_with_the_name_of_the_first(
    pieces: list[Path],
) -> None:
    with pytest.raises(CheckpointError, match=r"pass m-00001-of-00003.gguf"):
        read_gguf(pieces[1])


def test_an_absent_file_is_named(pieces: list[Path]) -> None:
    pieces[2].unlink()
    with pytest.raises(CheckpointError, match=r"m-00003-of-00003\.gguf is absent"):
        read_gguf(pieces[0])


def test_files_that_lead_back_to_the_first_are_refused(pieces: list[Path]) -> None:
    pieces[1].unlink()
    pieces[1].symlink_to(pieces[0])
    with pytest.raises(CheckpointError, match="says that it is file 0 of 3"):
        read_gguf(pieces[0])


def test_a_renamed_file_is_refused(pieces: list[Path], tmp_path: Path) -> None:
    shutil.copy(pieces[0], tmp_path / "renamed.gguf")
    with pytest.raises(CheckpointError, match="name it NAME-00001-of-00003"):
        read_gguf(tmp_path / "renamed.gguf")


@pytest.mark.parametrize("count", [2**31, -3, "3"])
def test_a_wrong_count_is_refused(count: int | str, write_gguf: WriteGguf) -> None:
    path = write_gguf(NAME.format(1), metadata={"split.no": 0, "split.count": count})
    with pytest.raises(CheckpointError, match=r"is damaged \(split\.count is"):
        read_gguf(path)


def test_a_tensor_in_two_files_is_refused(pieces: list[Path], write_gguf: WriteGguf) -> None:
    write_gguf(pieces[1].name, metadata={"split.no": 1, "split.count": 3}, shapes={"0.a": (4,)})
    with pytest.raises(CheckpointError, match=r"'0.a' is in m-00001-of-00003"):
        read_gguf(pieces[0])


def test_a_wrong_number_of_tensors_is_refused(pieces: list[Path], write_gguf: WriteGguf) -> None:
    write_gguf(pieces[1].name, metadata={"split.no": 1, "split.count": 3}, shapes={"x": (4,)})
    with pytest.raises(CheckpointError, match=r"6 tensors by split.tensors.count, 5 in the files"):
        read_gguf(pieces[0])
