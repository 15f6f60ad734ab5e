"""What of a model on the hub is here, and which hash its files have."""

from pathlib import Path

import pytest

from clover_local.fetch.pull import remove_damaged
from clover_local.fetch.remote import Remote, RemoteFile

SHA256_OF_ABC = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
GIT_BLOB_OF_ABC = (
    "f2ba8f84ab5c1bce84a7b441cb1959cfc7093b7f"  # echo -n abc | git hash-object --stdin
)


def remote(folder: Path, *files: RemoteFile) -> Remote:
    return Remote("owner/name", None, "c" * 40, files, (), folder / "models--owner--name")


@pytest.mark.parametrize("digest", [SHA256_OF_ABC, GIT_BLOB_OF_ABC], ids=["sha256", "git"])
def test_a_hash_says_itself_of_which_kind_it_is(tmp_path: Path, digest: str) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"abc")
    counted: list[int] = []
    file = RemoteFile("file", 3, digest)
    assert file.digest_of(path, counted.append) == digest
    assert sum(counted) == 3
    assert file.is_stored_apart == (digest == SHA256_OF_ABC)


def test_a_part_counts_and_a_file_of_another_length_does_not(tmp_path: Path) -> None:
    whole, part = RemoteFile("a", 10, "a" * 64), RemoteFile("b", 10, "b" * 64)
    short, absent = RemoteFile("c", 10, "d" * 64), RemoteFile("d", 10, "e" * 64)
    model = remote(tmp_path, whole, part, short, absent)
    model.blob(whole).parent.mkdir(parents=True)
    model.blob(whole).write_bytes(b"0" * 10)
    model.part(part).write_bytes(b"0" * 7)
    model.blob(short).write_bytes(b"0" * 9)
    assert [model.missing(file) for file in model.files] == [0, 3, 10, 10]
    assert [model.has(file) for file in model.files] == [True, False, False, False]


def test_a_copy_in_the_place_of_a_link_counts(tmp_path: Path) -> None:
    file = RemoteFile("a.json", 3, GIT_BLOB_OF_ABC)
    model = remote(tmp_path, file)
    model.folder.mkdir(parents=True)
    (model.folder / "a.json").write_bytes(b"abc")
    assert model.has(file)
    assert model.place(file) == model.folder / "a.json"


def test_files_of_one_content_are_counted_read_and_removed_once(tmp_path: Path) -> None:
    first, second = (RemoteFile(name, 3, SHA256_OF_ABC) for name in ("a", "b"))
    model = remote(tmp_path, first, second)
    assert (model.nbytes, model.missing_bytes, model.distinct) == (3, 3, (first,))
    model.blob(first).parent.mkdir(parents=True)
    model.blob(first).write_bytes(b"abx")
    read: list[tuple[int, int]] = []
    damaged = remove_damaged(model, on_progress=lambda done, total: read.append((done, total)))
    assert damaged == ("a", "b")
    assert read == [(3, 3)]
    assert not model.blob(first).exists()
    assert remove_damaged(model) == ()
