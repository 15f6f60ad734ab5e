"""Writing: bytes in the order given, aligned, the same every time, whole or not at all."""

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from clover_local.checkpoint import write
from clover_local.checkpoint.read import read_tensor
from clover_local.checkpoint.shards import read_shard, read_shards
from clover_local.checkpoint.write import (
    NamedTensor,
    expert_tensors,
    packed_tensors,
    shard_name,
    weight_tensors,
    write_file,
    write_index,
    write_shard,
)
from clover_local.errors import CheckpointError
from clover_local.kernels.packed import PackedWeight

RoundMatrix = Callable[..., PackedWeight]


def matrix(rows: int, columns: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def tensors() -> list[NamedTensor]:
    """Every dtype, odd sizes, an order that no sorting gives."""
    return [
        NamedTensor("z", matrix(3, 7).bfloat16()),
        NamedTensor("a", torch.tensor(1.5)),
        NamedTensor("m.words", torch.arange(-3, 3, dtype=torch.int32)),
        NamedTensor("empty", torch.empty(0, 4)),
        NamedTensor("b", matrix(5, 4).half().T),  # not contiguous
        NamedTensor("shape", torch.tensor([3, 7])),
    ]


def test_the_safetensors_package_reads_back_every_tensor(
    tmp_path: Path, tensors: list[NamedTensor]
) -> None:
    path = tmp_path / "a.safetensors"
    write_shard(path, tensors, metadata={"layer": "3"})
    back = load_file(path)
    assert back.keys() == {named.name for named in tensors}
    for named in tensors:
        assert back[named.name].dtype == named.tensor.dtype
        assert torch.equal(back[named.name], named.tensor)
    with safe_open(path, framework="pt") as file:
        assert file.metadata() == {"format": "pt", "clover_format_version": "1", "layer": "3"}


def test_bytes_come_in_the_order_given_from_a_multiple_of_256(
    tmp_path: Path, tensors: list[NamedTensor]
) -> None:
    path = tmp_path / "a.safetensors"
    for count in range(len(tensors) + 1):
        write_shard(path, tensors[:count])
        shard = read_shard(path)
        assert [tensor.name for tensor in shard.tensors] == [t.name for t in tensors[:count]]
        data_start = shard.nbytes - sum(tensor.nbytes for tensor in shard.tensors)
        assert data_start % 256 == 0
        for info, named in zip(shard.tensors, tensors, strict=False):
            assert torch.equal(read_tensor(info), named.tensor)


def test_the_same_tensors_make_the_same_bytes(tmp_path: Path, tensors: list[NamedTensor]) -> None:
    for name in ("a", "b"):
        write_shard(tmp_path / f"{name}.safetensors", tensors)
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()
    assert {path.name for path in tmp_path.iterdir()} == {"a.safetensors", "b.safetensors"}


@pytest.mark.parametrize("asymmetric", [False, True], ids=["symmetric", "asymmetric"])
def test_an_expert_is_one_record_and_its_shapes_come_last(
    round_matrix: RoundMatrix, asymmetric: bool
) -> None:
    gate, up, down = (
        round_matrix(matrix(rows, columns, rows), asymmetric=asymmetric)
        for rows, columns in ((32, 64), (32, 64), (64, 32))
    )
    parts = expert_tensors("e.7.", gate, up=up, down=down)
    assert [named.name for named in parts.main] == [
        "e.7.gate_proj.weight_packed",
        "e.7.up_proj.weight_packed",
        "e.7.gate_proj.weight_scale",
        "e.7.up_proj.weight_scale",
        "e.7.down_proj.weight_packed",
        "e.7.down_proj.weight_scale",
    ]
    ends = ["shape", "zero_point"] if asymmetric else ["shape"]
    assert [named.name for named in parts.last] == [
        f"e.7.{name}_proj.weight_{end}" for name in ("gate", "up", "down") for end in ends
    ]
    assert parts.last[0].tensor.tolist() == [32, 64]
    assert torch.equal(parts.main[1].tensor, up.data)


def test_plain_experts_have_one_tensor_a_matrix() -> None:
    gate, up, down = matrix(3, 5), matrix(3, 5), matrix(5, 3)
    parts = expert_tensors("e.", gate, up=up, down=down)
    names = ["e.gate_proj.weight", "e.up_proj.weight", "e.down_proj.weight"]
    assert [named.name for named in parts.main] == names
    assert parts.last == ()


def test_gate_and_up_of_two_formats_are_refused(round_matrix: RoundMatrix) -> None:
    gate, up = round_matrix(matrix(8, 64)), round_matrix(matrix(8, 64), bits=8)
    with pytest.raises(ValueError, match=r"gate and up of e\. have different formats"):
        expert_tensors("e.", gate, up=up, down=gate)


def test_minima_that_are_no_whole_multiple_of_the_scale_are_stored_as_they_are(
    round_matrix: RoundMatrix,
) -> None:
    weight = round_matrix(matrix(5, 64), asymmetric=True)
    assert weight.minimum is not None
    uneven = PackedWeight(weight.data, weight.scale, weight.minimum + 1e-3, 4, 32)
    names = [named.name for named in packed_tensors("x", uneven).last]
    assert names == ["x.weight_shape", "x.weight_min"]
    assert [named.name for named in weight_tensors("x", weight).last] == [
        "x.weight_shape",
        "x.weight_zero_point",
    ]


@pytest.mark.parametrize(
    ("named", "complaint"),
    [
        ([("a", torch.zeros(1)), ("a", torch.zeros(2))], "the tensor a is there twice"),
        ([("a", torch.zeros(1, dtype=torch.float64))], "a is torch.float64, written are BF16"),
    ],
    ids=["twice", "dtype"],
)
def test_wrong_tensors_are_refused_before_anything_is_written(
    tmp_path: Path, named: list[tuple[str, Tensor]], complaint: str
) -> None:
    with pytest.raises(ValueError, match=complaint):
        write_shard(tmp_path / "a.safetensors", [NamedTensor(*pair) for pair in named])
    assert not list(tmp_path.iterdir())


def test_a_shard_of_more_than_5_gb_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(write, "LARGEST_SHARD", 1000)
    with pytest.raises(ValueError, match=r"a\.safetensors would have 1256 bytes, a shard at most"):
        write_shard(tmp_path / "a.safetensors", [NamedTensor("a", torch.zeros(250))])


def fail_with(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Makes the disk fail at the last moment before a file is safe."""

    def fsync(_: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fsync)


def test_a_full_disk_is_named_with_the_bytes_needed_and_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_with(monkeypatch, errno.ENOSPC)
    needed = rf"{tmp_path} has no room for the 1256 bytes of a.safetensors: free some disk space"
    with pytest.raises(CheckpointError, match=needed):
        write_shard(tmp_path / "a.safetensors", [NamedTensor("a", torch.zeros(250))])
    assert not list(tmp_path.iterdir())


def test_a_failure_leaves_the_file_that_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "config.json"
    write_file(path, b"before")
    fail_with(monkeypatch, errno.EIO)
    with pytest.raises(CheckpointError, match=r"config\.json cannot be written \(.*\): check the"):
        write_file(path, b"after")
    assert path.read_bytes() == b"before"
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


def test_a_missing_folder_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="check the folder and its permissions"):
        write_file(tmp_path / "absent" / "a.json", b"{}")


def test_the_index_names_every_tensor_and_the_bytes_in_all(
    tmp_path: Path, tensors: list[NamedTensor]
) -> None:
    paths = [tmp_path / shard_name(number, 2) for number in (1, 2)]
    assert paths[0].name == "model-00001-of-00002.safetensors"
    write_shard(paths[0], tensors[:4])
    write_shard(paths[1], tensors[4:])
    write_index(tmp_path, [read_shard(path) for path in paths])
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text(encoding="utf-8"))
    assert index["metadata"] == {"total_size": sum(named.tensor.nbytes for named in tensors)}
    assert [shard.path for shard in read_shards(tmp_path)] == paths
