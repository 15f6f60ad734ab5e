"""Reading parts: the numbers that loading gives, in the dtypes of the files."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from clover_local.checkpoint.load import load_parameters
from clover_local.checkpoint.placements import open_checkpoint
from clover_local.checkpoint.read import read_experts, read_layer, read_outer, read_tensor
from clover_local.checkpoint.shards import read_shard
from clover_local.config import ModelConfig
from clover_local.errors import CheckpointError
from clover_local.kernels.packed import PackedWeight, Weight

SaveShards = Callable[[Path, Sequence[Mapping[str, Tensor]]], None]


def same(a: Weight, b: Weight) -> bool:
    if isinstance(a, PackedWeight) and isinstance(b, PackedWeight):
        return torch.equal(a.data, b.data) and torch.equal(a.scale, b.scale)
    return isinstance(a, Tensor) and isinstance(b, Tensor) and torch.equal(a.float(), b)


def assert_reads_what_loading_loads(folder: Path, config: ModelConfig) -> None:
    checkpoint = open_checkpoint(folder, config)
    loaded = load_parameters(checkpoint, config)
    parts = read_outer(checkpoint, config)
    for layer in range(config.num_hidden_layers):
        parts |= read_layer(checkpoint, config, layer)
        wanted = range(config.num_experts - 1, -1, -2)
        experts = read_experts(checkpoint, config, layer, wanted)
        for name in ("gate_up", "down"):
            expected: Sequence[Weight] = list(getattr(loaded.experts[layer], name))
            read: Sequence[Weight] = getattr(experts, name)
            assert len(read) == len(wanted)
            assert all(same(a, expected[e]) for a, e in zip(read, wanted, strict=True))
    assert parts.keys() == loaded.parameters.keys()
    for name, weight in parts.items():
        assert same(weight, loaded.parameters[name]), name


def test_fused_experts(golden_folder: Path, golden_config: ModelConfig) -> None:
    assert_reads_what_loading_loads(golden_folder, golden_config)


def test_experts_one_by_one_in_two_shards(
    model_folder: Path, golden_config: ModelConfig, save_shards: SaveShards
) -> None:
    tensors: dict[str, Tensor] = {}
    for name, value in load_file(model_folder / "model.safetensors").items():
        stem, fused, kind = name.rpartition(".experts.")
        if not fused:
            tensors[name] = value
        for expert, rows in enumerate(value if fused else ()):
            halves = ("down",) if kind == "down_proj" else ("gate", "up")
            for half, part in zip(halves, rows.chunk(len(halves)), strict=True):
                tensors[f"{stem}.experts.{expert}.{half}_proj.weight"] = part
    names = sorted(tensors)
    save_shards(model_folder, [{name: tensors[name] for name in names[i::2]} for i in range(2)])
    assert_reads_what_loading_loads(model_folder, golden_config)


def test_packed_matrices(quantized_folder: Path, golden_config: ModelConfig) -> None:
    assert_reads_what_loading_loads(quantized_folder, golden_config)


def test_the_dtype_is_that_of_the_file_and_taps_have_two_axes(
    golden_folder: Path, golden_config: ModelConfig
) -> None:
    layer = read_layer(open_checkpoint(golden_folder, golden_config), golden_config, 1)
    assert len(layer) == 20
    assert {weight.dtype for weight in layer.values() if isinstance(weight, Tensor)} == {
        torch.bfloat16
    }
    assert layer["layers.1.linear_attn.conv1d.weight"].shape == (256, 4)


def test_a_tied_head_is_the_embedding_itself(
    model_folder: Path, golden_config: ModelConfig
) -> None:
    tensors = load_file(model_folder / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, model_folder / "model.safetensors")
    tied = replace(golden_config, tie_word_embeddings=True)
    outer = read_outer(open_checkpoint(model_folder, tied), tied)
    assert outer["lm_head.weight"] is outer["embed_tokens.weight"]


def test_rows_of_a_tensor_are_read_alone(tmp_path: Path) -> None:
    value = torch.arange(7 * 3 * 5, dtype=torch.float32).view(7, 3, 5)
    save_file({"a": torch.zeros(3).half(), "b": value}, tmp_path / "a.safetensors")
    info = next(t for t in read_shard(tmp_path / "a.safetensors").tensors if t.name == "b")
    assert torch.equal(read_tensor(info), value)
    assert torch.equal(read_tensor(info, start_row=2, rows=3), value[2:5])
    assert torch.equal(read_tensor(info, start_row=5), value[5:])
    assert read_tensor(info, start_row=7).shape == (0, 3, 5)
    with pytest.raises(ValueError, match="rows 6 to 8 of b with 7"):
        read_tensor(info, start_row=6, rows=2)


def test_layers_and_experts_that_do_not_exist_are_wrong_calls(
    golden_folder: Path, golden_config: ModelConfig
) -> None:
    checkpoint = open_checkpoint(golden_folder, golden_config)
    with pytest.raises(ValueError, match="layer 4 of 4"):
        read_layer(checkpoint, golden_config, 4)
    with pytest.raises(ValueError, match="layer -1 of 4"):
        read_experts(checkpoint, golden_config, -1, [0])
    with pytest.raises(ValueError, match="expert 8 of 8"):
        read_experts(checkpoint, golden_config, 0, [0, 8])


def test_files_that_changed_after_opening_are_reported(
    model_folder: Path, golden_config: ModelConfig
) -> None:
    checkpoint = open_checkpoint(model_folder, golden_config)
    path = model_folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:20000])
    with pytest.raises(CheckpointError, match="ends too early: download it again"):
        read_outer(checkpoint, golden_config)
    with pytest.raises(CheckpointError, match="ends too early: download it again"):
        load_parameters(checkpoint, golden_config)
    path.unlink()
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_outer(checkpoint, golden_config)
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_parameters(checkpoint, golden_config)
