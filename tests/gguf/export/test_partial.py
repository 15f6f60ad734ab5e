"""Files that survive a stop at any moment."""

from pathlib import Path
from typing import NamedTuple

import pytest

from clover_local.errors import CheckpointError
from clover_local.gguf.export import partial
from clover_local.gguf.export.partial import is_finished, open_partial
from clover_local.gguf.types import TYPES
from clover_local.gguf.write import PlannedTensor, lay_out

TENSORS = [
    PlannedTensor(name, TYPES["F32"], (size,)) for name, size in (("a", 3), ("b", 9), ("c", 5))
]
LAYOUT = lay_out({"k": 1}, TENSORS)


class Stop(BaseException):
    """Ends a run as a signal does: nothing is tidied up."""


def content(number: int) -> memoryview:
    return memoryview(bytes([number + 1]) * TENSORS[number].nbytes)


def write(path: Path, *, stop_after: int | None = None) -> list[int]:
    """Writes what is left; the numbers of the tensors that had to be written."""
    numbers = []
    with open_partial(path, LAYOUT) as file:
        for number in range(file.finished, len(TENSORS)):
            file.start_tensor(number)
            file.write(content(number))
            file.end_tensor(number)
            numbers.append(number)
            if number == stop_after:
                raise Stop
        file.finish()
    return numbers


@pytest.fixture
def sync_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partial, "SYNC_BYTES", 1)


def expected() -> bytes:
    whole = bytearray(LAYOUT.nbytes)
    whole[: len(LAYOUT.header)] = LAYOUT.header
    for number, start in enumerate(LAYOUT.starts):
        whole[start : start + TENSORS[number].nbytes] = content(number)
    return bytes(whole)


def test_a_run_without_a_stop_leaves_one_file(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    assert not is_finished(path, LAYOUT)
    assert write(path) == [0, 1, 2]
    assert path.read_bytes() == expected()
    assert list(tmp_path.iterdir()) == [path]
    assert is_finished(path, LAYOUT)


@pytest.mark.usefixtures("sync_each")
@pytest.mark.parametrize("stop_after", [0, 1, 2])
def test_a_stopped_run_goes_on_where_it_was(stop_after: int, tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    with pytest.raises(Stop):
        write(path, stop_after=stop_after)
    assert not path.exists()
    assert write(path) == list(range(stop_after + 1, 3))
    assert path.read_bytes() == expected()
    assert list(tmp_path.iterdir()) == [path]


def test_what_was_not_synced_is_written_again(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    with pytest.raises(Stop):
        write(path, stop_after=1)
    assert write(path) == [0, 1, 2]
    assert path.read_bytes() == expected()


@pytest.mark.parametrize("last", [0, 1])
def test_an_interrupt_keeps_what_is_finished(last: int, tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    with pytest.raises(KeyboardInterrupt), open_partial(path, LAYOUT) as file:
        for number in range(last + 1):
            file.start_tensor(number)
            file.write(content(number))
            file.end_tensor(number)
        file.start_tensor(last + 1)
        file.write(content(last + 1)[:3])  # half a tensor
        raise KeyboardInterrupt
    assert write(path) == list(range(last + 1, 3))
    assert path.read_bytes() == expected()


class Damage(NamedTuple):
    name: str
    content: bytes | None


@pytest.mark.usefixtures("sync_each")
@pytest.mark.parametrize(
    "damage",
    [
        Damage(".x.gguf.journal", b"{"),
        Damage(".x.gguf.journal", b'{"header": "other", "tensors": 2}'),
        Damage(".x.gguf.journal", b'{"tensors": 99}'),
        Damage(".x.gguf.journal", b"[]"),
        Damage(".x.gguf.partial", b"short"),
        Damage(".x.gguf.partial", None),
    ],
    ids=lambda damage: f"{damage.name}: {damage.content!r}",
)
def test_remains_that_make_no_sense_are_not_used(damage: Damage, tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    with pytest.raises(Stop):
        write(path, stop_after=1)
    if damage.content is None:
        (tmp_path / damage.name).unlink()
    else:
        (tmp_path / damage.name).write_bytes(damage.content)
    assert write(path) == [0, 1, 2]
    assert path.read_bytes() == expected()


@pytest.mark.usefixtures("sync_each")
def test_a_tensor_that_is_no_longer_whole_is_made_again(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    with pytest.raises(Stop):
        write(path, stop_after=1)
    with (tmp_path / ".x.gguf.partial").open("r+b") as file:
        file.truncate(LAYOUT.starts[1] + 4)
    assert write(path) == [0, 1, 2]
    assert path.read_bytes() == expected()


@pytest.mark.parametrize("finished", [0, 2])
def test_two_cannot_write_one_file(
    finished: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x.gguf"
    if finished:
        monkeypatch.setattr(partial, "SYNC_BYTES", 1)
        with pytest.raises(Stop):
            write(path, stop_after=finished - 1)
    with (
        open_partial(path, LAYOUT) as file,
        pytest.raises(CheckpointError, match="is being written by another process"),
    ):
        assert file.finished == finished
        write(path)
    assert write(path)[-1] == 2
    assert path.read_bytes() == expected()


def test_another_file_of_that_name_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(b"mine")
    with pytest.raises(CheckpointError, match="exists and is another file"):
        is_finished(path, LAYOUT)
    path.write_bytes(bytes(LAYOUT.nbytes))
    with pytest.raises(CheckpointError, match="exists and is another file"):
        is_finished(path, LAYOUT)


def test_no_room_and_no_folder_are_said_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(CheckpointError, match="cannot be written"):
        write(tmp_path / "absent" / "x.gguf")
    full = type("Usage", (), {"free": 10})()
    monkeypatch.setattr("shutil.disk_usage", lambda path: full)
    with pytest.raises(CheckpointError, match=r"no room for the \d+ bytes of x\.gguf"):
        write(tmp_path / "x.gguf")
    assert list(tmp_path.iterdir()) == []
