"""Files that appear whole or not at all."""

from pathlib import Path

import pytest

from clover_local.files import replacing


def test_a_file_takes_its_place_when_all_has_gone_well(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text("before")
    with replacing(path) as file:
        file.write(b"after")
        file.flush()
        assert path.read_text() == "before"
    assert path.read_text() == "after"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("error", [OSError("full"), KeyboardInterrupt()], ids=repr)
def test_what_goes_wrong_leaves_the_file_as_it_was(tmp_path: Path, error: BaseException) -> None:
    path = tmp_path / "a.json"
    path.write_text("before")
    with pytest.raises(type(error)), replacing(path) as file:
        file.write(b"aft")
        raise error
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_that_is_not_there_is_an_error_of_the_system(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), replacing(tmp_path / "absent" / "a.json"):
        pytest.fail("there is nothing to write to")
