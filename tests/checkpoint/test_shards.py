"""Safetensors headers and the index: what is read, and what damage is recognised."""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from clover_local.checkpoint.shards import (
    INDEX_NAME,
    MAX_HEADER_BYTES,
    abbreviated,
    read_integers,
    read_shard,
    read_shards,
)
from clover_local.errors import CheckpointError

SaveShards = Callable[[Path, Sequence[Mapping[str, Tensor]]], None]


def raw(header: object, data: bytes = b"", *, length: int | None = None) -> bytes:
    """A safetensors file by hand, with the header's length as it is or as claimed."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def entry(dtype: object, shape: object, *offsets: object) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": list(offsets)}


@pytest.fixture
def three_shards(model_folder: Path, save_shards: SaveShards) -> Path:
    """The golden checkpoint in three shards."""
    tensors = load_file(model_folder / "model.safetensors")
    names = sorted(tensors)
    parts = [{name: tensors[name] for name in names[start::3]} for start in range(3)]
    save_shards(model_folder, parts)
    return model_folder


def test_the_header_says_what_the_safetensors_package_reads(model_folder: Path) -> None:
    path = model_folder / "model.safetensors"
    shard = read_shard(path)
    content = path.read_bytes()
    tensors = load_file(path)
    assert {tensor.name for tensor in shard.tensors} == tensors.keys()
    assert shard.nbytes == len(content)
    for tensor in shard.tensors:
        value = tensors[tensor.name]
        assert (tensor.dtype, tensor.shape, tensor.shard) == ("BF16", tuple(value.shape), path)
        data = bytes(value.view(torch.uint8).flatten().tolist())
        assert content[tensor.start : tensor.start + tensor.nbytes] == data


def test_tensors_come_in_the_order_of_their_bytes(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    header = {
        "last": entry("F16", [1], 9, 11),
        "none": entry("F32", [0, 7], 8, 8),
        "first": entry("F32", [2, 1], 0, 8),
        "__metadata__": {"format": "pt"},
        "odd": entry("U8", [1], 8, 9),
    }
    path.write_bytes(raw(header, bytes(11)))
    assert [tensor.name for tensor in read_shard(path).tensors] == ["first", "none", "odd", "last"]


def test_a_file_without_tensors_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(raw({}))
    assert read_shard(path).tensors == ()


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "truncated, 0 bytes"),
        (b"\x10\0\0", "truncated, 3 bytes"),
        (raw({"a": entry("F32", [2], 0, 8)}, bytes(7)), "truncated, 76 bytes of 77"),
        (raw({"a": entry("F32", [2], 0, 8)}, bytes(9)), "1 bytes follow the last tensor"),
        (raw(b"{}", length=50), "truncated, 10 bytes, of which the header would take 58"),
        (raw(b"{}", length=MAX_HEADER_BYTES + 1), "it is no safetensors file"),
        (raw(b"{}", length=2**63), "it is no safetensors file"),
        (b"<!DOCTYPE html><html>not found</html>", "it is no safetensors file"),
        (raw(b'{"a": '), "unreadable header"),
        (raw(b'{"\xff\xfe": 1}'), "unreadable header"),
        (raw(b"[" * 100_000), "unreadable header"),
        (raw(b'{"a": 1, "a": 2}'), "a name occurs twice"),
        (raw([1, 2]), "its header is no JSON object"),
        (raw({"a": 3}), "unreadable header entry a"),
        (raw({"a": entry("F32", [2], 0)}), "unreadable header entry a"),
        (raw({"a": entry("F32", [-2], 0, 8)}, bytes(8)), "unreadable header entry a"),
        (raw({"a": entry("F32", [2.0], 0, 8)}, bytes(8)), "unreadable header entry a"),
        (raw({"a": entry("F32", [True], 0, 4)}, bytes(4)), "unreadable header entry a"),
        (raw({"a": entry(None, [2], 0, 8)}, bytes(8)), "unreadable header entry a"),
        (raw({"a": entry("F32", [3], 0, 8)}, bytes(8)), "a is F32 [3] in 8 bytes"),
        (
            raw({"a": entry("F32", [2], 0, 8), "b": entry("F32", [2], 4, 12)}, bytes(12)),
            "the bytes of b do not follow",
        ),
        (
            raw({"a": entry("F32", [2], 0, 8), "b": entry("F32", [1], 12, 16)}, bytes(16)),
            "the bytes of b do not follow",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_damaged_file_is_named_with_what_is_wrong(
    tmp_path: Path, content: bytes, complaint: str
) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        read_shard(path)
    message = str(caught.value)
    assert message.startswith(f"{path} is damaged (")
    assert complaint in message
    assert message.endswith(": download it again")
    assert "\n" not in message


def test_a_dtype_that_is_unknown_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(raw({"a": entry("F4", [2], 0, 1)}, bytes(1)))
    with pytest.raises(CheckpointError, match="a has the dtype F4, which this runtime cannot read"):
        read_shard(path)


def test_shards_hold_together_what_one_file_holds(three_shards: Path, golden_folder: Path) -> None:
    shards = read_shards(three_shards)
    assert [shard.path.name[:11] for shard in shards] == [
        "model-00001",
        "model-00002",
        "model-00003",
    ]
    names = [tensor.name for shard in shards for tensor in shard.tensors]
    (single,) = read_shards(golden_folder)
    assert sorted(names) == sorted(tensor.name for tensor in single.tensors)


def test_one_file_of_another_name_needs_no_index(model_folder: Path) -> None:
    (model_folder / "model.safetensors").rename(model_folder / "clover.safetensors")
    (shard,) = read_shards(model_folder)
    assert shard.path.name == "clover.safetensors"


def test_a_folder_without_weights_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"holds no \.safetensors file: download"):
        read_shards(tmp_path)


def test_shards_without_index_ask_for_it(three_shards: Path) -> None:
    (three_shards / INDEX_NAME).unlink()
    with pytest.raises(CheckpointError, match=r"holds 3 \.safetensors files and no model\.safe"):
        read_shards(three_shards)


def test_a_missing_shard_is_named(three_shards: Path) -> None:
    (three_shards / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"names model-00002-of-00003\.safetensors, which is"):
        read_shards(three_shards)


def test_a_truncated_shard_is_named(three_shards: Path) -> None:
    path = three_shards / "model-00003-of-00003.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[:-1])
    size = len(content)
    with pytest.raises(CheckpointError) as caught:
        read_shards(three_shards)
    assert f"{path} is damaged (truncated, {size - 1} bytes of {size})" in str(caught.value)


def test_a_tensor_in_two_shards_is_named_with_both(
    model_folder: Path, save_shards: SaveShards
) -> None:
    twice = {"model.norm.weight": torch.ones(3)}
    save_shards(model_folder, [{**twice, "lm_head.weight": torch.ones(2)}, twice])
    with pytest.raises(CheckpointError) as caught:
        read_shards(model_folder)
    assert "model.norm.weight is in both model-00001" in str(caught.value)
    assert "and model-00002-of-00002.safetensors" in str(caught.value)


def edit_index(folder: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    path = folder / INDEX_NAME
    index = json.loads(path.read_text(encoding="utf-8"))
    edit(index["weight_map"])
    path.write_text(json.dumps(index), encoding="utf-8")


@pytest.mark.parametrize(
    ("edit", "complaint"),
    [
        (lambda names: names.pop("lm_head.weight"), "omits lm_head.weight"),
        (
            lambda names: names.update({"ghost": "model-00001-of-00003.safetensors"}),
            "names the absent ghost",
        ),
        (
            lambda names: names.update({"model.norm.weight": "model-00001-of-00003.safetensors"}),
            "misplaces model.norm.weight",
        ),
    ],
    ids=["omits", "invents", "misplaces"],
)
def test_an_index_that_contradicts_the_shards_is_refused(
    three_shards: Path, edit: Callable[[dict[str, Any]], object], complaint: str
) -> None:
    edit_index(three_shards, edit)
    with pytest.raises(CheckpointError) as caught:
        read_shards(three_shards)
    assert f"{INDEX_NAME} {complaint}: download" in str(caught.value)


@pytest.mark.parametrize(
    "content",
    ["{", "[]", '{"weight_map": {}}', '{"weight_map": {"a": 3}}', '{"weight_map": {"a": "x.bin"}}'],
)
def test_an_index_that_is_none_is_refused(model_folder: Path, content: str) -> None:
    (model_folder / INDEX_NAME).write_text(content, encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"index\.json is damaged"):
        read_shards(model_folder)


@pytest.mark.parametrize("name", ["../a.safetensors", "/etc/a.safetensors", "sub/a.safetensors"])
def test_an_index_cannot_lead_out_of_the_folder(model_folder: Path, name: str) -> None:
    index = json.dumps({"weight_map": {"a": name}})
    (model_folder / INDEX_NAME).write_text(index, encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"is no name of a \.safetensors file"):
        read_shards(model_folder)


def test_a_single_file_beside_an_index_of_others_is_ambiguous(three_shards: Path) -> None:
    save_file({"a": torch.zeros(1)}, three_shards / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"holds both model\.safetensors and .*remove one"):
        read_shards(three_shards)


def test_long_lists_are_abbreviated_with_a_count() -> None:
    assert abbreviated(["a", "b", "c", "d"]) == "a, b, c, d"
    assert abbreviated(["a", "b", "c", "d", "e", "f"]) == "a, b, c, d and 2 more"


@pytest.mark.parametrize(
    "header",
    [
        json.dumps({"__metadata__": 5}).encode(),
        json.dumps({"__metadata__": {"step": 1}}).encode(),
        json.dumps({}).encode("utf-16"),
    ],
    ids=["metadata", "metadata value", "utf-16"],
)
def test_a_header_that_the_safetensors_package_refuses_is_damage(
    tmp_path: Path, header: bytes
) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(raw(header))
    with pytest.raises(CheckpointError, match="damaged"):
        read_shard(path)


@pytest.mark.parametrize("name", ["model.safetensors", INDEX_NAME])
@pytest.mark.parametrize("kind", ["pipe", "folder", "dangling link"])
def test_what_is_no_file_is_refused_and_not_waited_for(
    model_folder: Path, name: str, kind: str
) -> None:
    path = model_folder / name
    path.unlink(missing_ok=True)
    make: dict[str, Callable[[], object]] = {
        "pipe": lambda: os.mkfifo(path),
        "folder": path.mkdir,
        "dangling link": lambda: path.symlink_to("nothing"),
    }
    make[kind]()
    with pytest.raises(CheckpointError, match=f"{name} cannot be read"):
        read_shards(model_folder)


def test_an_index_with_an_endless_name_is_damage(model_folder: Path) -> None:
    content = {"weight_map": {"a": "a" * 5000 + ".safetensors"}}
    (model_folder / INDEX_NAME).write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(CheckpointError, match="damaged") as caught:
        read_shards(model_folder)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(("version", "known"), [("1", True), ("2", False), ("x", False)])
def test_a_newer_format_is_refused_by_a_sentence(
    model_folder: Path, version: str, known: bool
) -> None:
    path = model_folder / "model.safetensors"
    save_file(load_file(path), path, metadata={"clover_format_version": version})
    if known:
        (shard,) = read_shards(model_folder)
        assert shard.metadata == {"clover_format_version": version}
        return
    complaint = rf"model\.safetensors has the clover_format_version {version}, .* install a newer"
    with pytest.raises(CheckpointError, match=complaint):
        read_shards(model_folder)


def test_integers_are_read_with_their_sign(tmp_path: Path) -> None:
    long, short = torch.tensor([[1, -2], [2**40, 3]]), torch.tensor([-5], dtype=torch.int32)
    save_file({"a": torch.zeros(3), "long": long, "short": short}, tmp_path / "a.safetensors")
    tensors = [t for t in read_shard(tmp_path / "a.safetensors").tensors if t.name != "a"]
    assert read_integers(tensors) == {"long": (1, -2, 2**40, 3), "short": (-5,)}
