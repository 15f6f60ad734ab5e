"""Headers: what a good file says, and the one line that each bad file gets."""

import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from clover_local.errors import CheckpointError
from clover_local.gguf.container import read_file
from tests.gguf.conftest import WriteGguf

HEADER = 24  # bytes before the first pair


def string(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def header(tensors: int, pairs: int, rest: bytes = b"", *, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, pairs) + rest


def entry(
    name: bytes = b"t",
    sizes: tuple[int, ...] = (32,),
    kind: int = 0,
    offset: int = 0,
) -> bytes:
    dimensions = len(sizes)
    return string(name) + struct.pack(f"<I{dimensions}QIQ", dimensions, *sizes, kind, offset)


def padded(content: bytes, data: int = 128) -> bytes:
    return content + bytes(-len(content) % 32) + bytes(data)


def test_every_kind_of_value_comes_back(write_gguf: WriteGguf) -> None:
    metadata = {
        "a.int": 7,
        "a.float": 0.5,
        "a.flag": True,
        "a.text": "grüße",
        "a.texts": ["", "x" * 100],
        "a.floats": np.array([1.5, -2.0], "<f4"),
        "a.flags": np.array([True, False]),
        "a.empty": np.array([], "<i4"),
    }
    read = read_file(write_gguf(metadata=metadata)).metadata
    assert list(read) == list(metadata)
    for key, value in metadata.items():
        if isinstance(value, np.ndarray):
            found = read[key]
            assert isinstance(found, np.ndarray)
            assert found.dtype == value.dtype
            assert found.tolist() == value.tolist()
        else:
            assert read[key] == value
            assert type(read[key]) is type(value)


def test_tensors_are_where_the_header_says(write_gguf: WriteGguf) -> None:
    path = write_gguf(shapes={"a": (3, 5), "b": (2, 7, 4)})
    a, b = read_file(path).tensors
    content = path.read_bytes()
    assert (a.name, a.shape, b.name, b.shape) == ("a", (3, 5), "b", (2, 7, 4))
    for tensor, count in ((a, 15), (b, 56)):
        assert tensor.start % 32 == 0
        numbers = np.frombuffer(content[tensor.start : tensor.start + tensor.nbytes], "<f4")
        assert numbers.tolist() == list(range(count))


def test_another_reader_sees_the_same(write_gguf: WriteGguf) -> None:
    gguf = pytest.importorskip("gguf")
    metadata = {
        "general.architecture": "qwen35moe",
        "a.int": 7,
        "a.texts": ["x", "é"],
        "a.floats": np.array([0.25], "<f4"),
    }
    reader = gguf.GGUFReader(write_gguf(metadata=metadata, shapes={"a": (3, 32)}))
    assert reader.fields["a.int"].contents() == 7
    assert reader.fields["a.texts"].contents() == ["x", "é"]
    assert reader.fields["a.floats"].contents() == [0.25]
    assert reader.tensors[0].data.tolist() == np.arange(96.0).reshape(3, 32).tolist()


def test_a_file_of_another_writer_is_read(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    path = tmp_path / "other.gguf"
    writer = gguf.GGUFWriter(path, "qwen35moe")
    writer.add_custom_alignment(64)
    writer.add_uint64("a.long", 1 << 40)
    writer.add_array("a.list", [1, 2, 3])
    writer.add_tensor("t", np.arange(10, dtype=np.float32).reshape(2, 5))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = read_file(path)
    assert file.metadata["a.long"] == 1 << 40
    assert list(file.metadata["a.list"]) == [1, 2, 3]  # type: ignore[arg-type]
    assert file.tensors[0].shape == (2, 5)
    assert file.tensors[0].start % 64 == 0


BAD = {
    "empty": (b"", "it is empty"),
    "other magic": (b"PK\x03\x04" + bytes(60), "is no GGUF file"),
    "short magic": (b"GG", "truncated"),
    "version 1": (header(0, 0, version=1), "GGUF version 1"),
    "version 4": (header(0, 0, version=4), "newer clover-local"),
    "big-endian": (header(0, 0, version=3 << 24), "big-endian"),
    "half a header": (header(0, 0)[:12], "truncated"),
    "half a key": (header(0, 1, struct.pack("<Q", 99) + bytes(20)), "does not end in the file"),
    "2^40 pairs": (header(0, 1 << 40, bytes(99)), "1099511627776 metadata pairs"),
    "2^40 tensors": (header(1 << 40, 0, bytes(99)), "1099511627776 tensors"),
    "2^40 strings": (
        header(0, 1, string(b"k") + struct.pack("<IIQ", 9, 8, 1 << 40)),
        "1099511627776 strings in 'k'",
    ),
    "2^61 numbers": (
        header(0, 1, string(b"k") + struct.pack("<IIQ", 9, 11, 1 << 61)),
        "numbers in 'k'",
    ),
    "a string of 2^63 bytes": (
        header(0, 1, string(b"k") + struct.pack("<IQ", 8, 1 << 63)),
        "does not end in the file",
    ),
    "array of arrays": (
        header(0, 1, string(b"k") + struct.pack("<IIQ", 9, 9, 1)),
        "array of arrays",
    ),
    "unknown value type": (header(0, 1, string(b"k") + struct.pack("<IQ", 77, 1)), "type 77"),
    "bad UTF-8 in a key": (header(0, 1, string(b"\xff\xfe") + bytes(20)), "not UTF-8"),
    "bad UTF-8 in a value": (
        header(0, 1, string(b"k") + struct.pack("<I", 8) + string(b"\xc3")),
        "'k' is not UTF-8",
    ),
    "a key twice": (
        header(0, 2, 2 * (string(b"k") + struct.pack("<IQ", 10, 1))),
        "'k' is there twice",
    ),
    "a tensor twice": (padded(header(2, 0, 2 * entry())), "'t' is there twice"),
    "unknown tensor type": (padded(header(1, 0, entry(kind=999))), "the type 999"),
    "no dimension": (padded(header(1, 0, entry(sizes=()) + bytes(8))), "0 dimensions"),
    "five dimensions": (padded(header(1, 0, entry(sizes=(1, 1, 1, 1, 1)))), "5 dimensions"),
    "2^32 dimensions": (
        padded(header(1, 0, string(b"t") + struct.pack("<I", (1 << 32) - 1))),
        "4294967295 dimensions",
    ),
    "sizes that overflow": (
        padded(header(1, 0, entry(sizes=(1 << 32, 1 << 32)))),
        "[4294967296, 4294967296]",
    ),
    "a size of 0": (padded(header(1, 0, entry(sizes=(0, 4)))), "[4, 0]"),
    "half a block": (padded(header(1, 0, entry(sizes=(33,), kind=8))), "Q8_0 [33]"),
    "truncated data": (padded(header(1, 0, entry(sizes=(64,)))), "truncated, 't' would end"),
    "offset beyond the file": (padded(header(1, 0, entry(offset=1 << 62))), "would end at byte"),
    "overlap": (
        padded(header(2, 0, entry() + entry(b"u", offset=64)), 256),
        "'u' overlaps 't'",
    ),
    "alignment of 0": (
        padded(header(0, 1, string(b"general.alignment") + struct.pack("<II", 4, 0))),
        "general.alignment is 0",
    ),
    "alignment that is a text": (
        padded(header(0, 1, string(b"general.alignment") + struct.pack("<I", 8) + string(b"x"))),
        "general.alignment is 'x'",
    ),
}


@pytest.mark.parametrize(("content", "complaint"), BAD.values(), ids=BAD.keys())
def test_a_bad_file_gives_one_line_that_names_it(
    content: bytes, complaint: str, tmp_path: Path
) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        read_file(path)
    message = str(caught.value)
    assert complaint in message
    assert str(path) in message
    assert "\n" not in message


def test_no_prefix_of_a_good_file_and_no_changed_byte_raises_anything_else(
    write_gguf: WriteGguf, tmp_path: Path
) -> None:
    content = write_gguf(metadata={"k": ["a", "b"], "n": np.array([1], "<i4")}).read_bytes()
    path = tmp_path / "changed.gguf"
    changed: list[Callable[[int], bytes]] = [
        lambda at: content[:at],
        lambda at: content[:at] + b"\xff" + content[at + 1 :],
        lambda at: content[:at] + b"\x00" + content[at + 1 :],
    ]
    for at in range(len(content) - 150):  # the header
        for change in changed:
            path.write_bytes(change(at))
            try:
                read_file(path)
            except CheckpointError as error:
                assert "\n" not in str(error)


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "absent.gguf", Path("/dev/null")):
        with pytest.raises(CheckpointError, match="cannot be read"):
            read_file(path)


def test_reading_a_header_needs_no_torch() -> None:
    code = "import sys; import clover_local.gguf.splits; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
