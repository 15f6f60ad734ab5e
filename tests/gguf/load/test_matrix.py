"""Parameters from file tensors: integers stay, heads and values go back."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from clover_local.checkpoint.load import LoadedParameters, load_parameters
from clover_local.checkpoint.read import read_experts, read_layer
from clover_local.config import ModelConfig
from clover_local.gguf.export.plain import encode_q4_0, encode_q8_0
from clover_local.gguf.load.matrix import GgufMatrix
from clover_local.gguf.tensors import Heads, Value, named_entries
from clover_local.gguf.types import TYPES
from clover_local.kernels.int4 import unpack
from clover_local.kernels.packed import PackedWeight, Weight
from clover_local.session import open_model
from tests.gguf.conftest import ExportTo
from tests.gguf.load.conftest import Edited


def loaded(path: Path, dtype: torch.dtype = torch.float32) -> LoadedParameters:
    opened = open_model(str(path))
    return load_parameters(opened.checkpoint, opened.config, dtype=dtype)


def plain(weight: Weight) -> Tensor:
    return weight.dequantize() if isinstance(weight, PackedWeight) else weight


def test_float32_gives_every_parameter_back(golden_folder: Path, golden_gguf: Path) -> None:
    before, after = loaded(golden_folder), loaded(golden_gguf)
    assert after.parameters.keys() == before.parameters.keys()
    for name, weight in before.parameters.items():
        found = after.parameters[name]
        assert isinstance(weight, Tensor)
        assert isinstance(found, Tensor)
        assert found.dtype == weight.dtype
        assert found.shape == weight.shape
        if name.endswith("A_log"):  # what counts is its exp
            assert torch.allclose(found.exp(), weight.exp(), rtol=2e-7, atol=0)
        elif "norm" in name and "linear_attn" not in name:
            assert torch.equal(1 + found, 1 + weight)
        else:
            assert torch.equal(found, weight), name
    for ours, theirs in zip(after.experts, before.experts, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            assert isinstance(a, Tensor)
            assert isinstance(b, Tensor)
            assert torch.equal(a, b)


@pytest.mark.parametrize("file_type", ["Q8_0", "Q4_0"])
def test_loaded_integers_are_the_files(
    file_type: str, golden_folder: Path, export_to: ExportTo, tmp_path: Path
) -> None:
    path = export_to(str(golden_folder), tmp_path / "x.gguf", file_type=file_type)
    edited, model = Edited(path), loaded(path)

    def integers(name: str) -> tuple[np.ndarray, np.ndarray]:
        kind, shape, data = edited.tensors[name]
        blocks = np.frombuffer(data, np.uint8).reshape(*shape[:-1], -1, kind.nbytes)
        stored = blocks[..., 2:]
        values = stored.view(np.int8)
        if kind.name == "Q4_0":
            values = np.concatenate([stored & 15, stored >> 4], -1).astype(np.int8) - 8
        return values.reshape(shape), blocks[..., :2].copy().view("<f2")[..., 0]

    def same(weight: Weight, values: np.ndarray, scales: np.ndarray) -> bool:
        assert isinstance(weight, PackedWeight)
        held = unpack(weight.data, weight.bits).numpy()
        return np.array_equal(held, values) and np.array_equal(weight.scale.numpy(), scales)

    q_proj = model.parameters["layers.3.self_attn.q_proj.weight"]
    assert same(q_proj, *integers("blk.3.attn_q.weight"))
    gate, gate_scales = integers("blk.1.ffn_gate_exps.weight")
    up, up_scales = integers("blk.1.ffn_up_exps.weight")
    for expert, weight in enumerate(model.experts[1].gate_up):
        rows = np.concatenate([gate[expert], up[expert]])
        assert same(weight, rows, np.concatenate([gate_scales[expert], up_scales[expert]]))
    # Columns of heads, tiled in the file, are whole groups here: they go back with their scales.
    tiled, tiled_scales = integers("blk.0.ssm_out.weight")
    heads = [0, 2, 1, 3]
    out = model.parameters["layers.0.linear_attn.out_proj.weight"]
    grouped = tiled.reshape(64, 4, 32)[:, heads].reshape(64, 128)
    assert same(out, grouped, tiled_scales[:, heads])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_small_parameters_are_float32_and_the_embedding_has_the_dtype(
    dtype: torch.dtype, golden_folder: Path, export_to: ExportTo, tmp_path: Path
) -> None:
    path = export_to(str(golden_folder), tmp_path / "x.gguf", file_type="Q8_0")
    parameters = loaded(path, dtype).parameters
    embedding = parameters["embed_tokens.weight"]
    assert isinstance(embedding, Tensor)
    assert embedding.dtype == dtype
    for name in ("norm.weight", "layers.0.mlp.gate.weight", "layers.0.linear_attn.A_log"):
        small = parameters[name]
        assert isinstance(small, Tensor)
        assert small.dtype == torch.float32
    assert isinstance(parameters["lm_head.weight"], PackedWeight)


def test_reading_by_parts_gives_the_same_as_loading(
    golden_folder: Path, export_to: ExportTo, tmp_path: Path
) -> None:
    path = export_to(str(golden_folder), tmp_path / "x.gguf", file_type="Q4_0")
    opened, whole = open_model(str(path)), loaded(path)
    layer = read_layer(opened.checkpoint, opened.config, 0)
    for name, weight in layer.items():
        assert torch.equal(plain(weight).float(), plain(whole.parameters[name]).float())
    gate_up, down = read_experts(opened.checkpoint, opened.config, 0, [3])
    assert torch.equal(plain(gate_up[0]), plain(whole.experts[0].gate_up[3]))
    assert torch.equal(plain(down[0]), plain(whole.experts[0].down[3]))


def test_gate_and_up_of_different_types_become_int8(
    golden_folder: Path, export_to: ExportTo, tmp_path: Path
) -> None:
    types = ("Q8_0", "Q4_0")
    files = [
        Edited(export_to(str(golden_folder), tmp_path / f"{kind}.gguf", file_type=kind))
        for kind in types
    ]
    for layer in range(4):
        name = f"blk.{layer}.ffn_up_exps.weight"
        files[0].tensors[name] = files[1].tensors[name]
    mixed = loaded(files[0].write(tmp_path / "mixed.gguf"))
    one, other = (loaded(tmp_path / f"{kind}.gguf") for kind in types)
    weight = mixed.experts[0].gate_up[2]
    assert isinstance(weight, PackedWeight)
    assert (weight.bits, weight.group_size) == (8, 32)
    wanted = torch.cat(
        [plain(one.experts[0].gate_up[2])[:32], plain(other.experts[0].gate_up[2])[32:]]
    )
    limit = weight.scale.float().repeat_interleave(32, 1) * 0.5001
    assert bool(((weight.dequantize() - wanted).abs() <= limit).all())


def out_proj(config: ModelConfig, kind: str, encoded: np.ndarray, shape: tuple[int, int]) -> Weight:
    (entry,) = {each.entry for each in named_entries(config) if each.entry.heads is Heads.COLUMNS}
    matrix = GgufMatrix(
        "x",
        TYPES[kind],
        Path("x"),
        0,
        encoded.nbytes,
        shape,
        Value.SAME,
        Heads.COLUMNS,
        entry.order(config),
        plain=False,
    )
    return matrix.decode(torch.from_numpy(encoded.reshape(-1)))


@pytest.mark.parametrize("head_dim", [16, 32, 64])
def test_heads_that_cut_groups_leave_the_matrix_plain(
    head_dim: int, golden_config: ModelConfig
) -> None:
    config = replace(golden_config, linear_value_head_dim=head_dim)
    columns = 4 * head_dim
    values = np.random.default_rng(0).standard_normal((6, columns)).astype(np.float32)
    weight = out_proj(config, "Q8_0", encode_q8_0(values), (6, columns))
    assert isinstance(weight, PackedWeight) == (head_dim >= 32)
    heads = np.array([0, 2, 1, 3])
    expected = values.reshape(6, 4, head_dim)[:, heads].reshape(6, columns)
    assert np.abs(plain(weight).numpy() - expected).max() < 0.02
    four = out_proj(config, "Q4_0", encode_q4_0(values), (6, columns))
    assert np.abs(plain(four).numpy() - expected).max() < 0.35


def test_log_of_exp_ends_where_it_began() -> None:
    a_log = torch.randn(2000, generator=torch.Generator().manual_seed(3)) * 3
    decay = -a_log.double().exp().float()
    matrix = GgufMatrix(
        "x",
        TYPES["F32"],
        Path("x"),
        0,
        4 * len(decay),
        tuple(decay.shape),
        Value.MINUS_EXP,
        Heads.NONE,
        None,
        plain=True,
    )
    back = matrix.decode(decay.view(torch.uint8))
    assert isinstance(back, Tensor)
    assert torch.equal(-back.double().exp().float(), decay)
