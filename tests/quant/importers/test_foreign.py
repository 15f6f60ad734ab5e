"""What every foreign checkpoint has to be, whatever its format."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from clover_local.checkpoint.placements import IMPORTED_METHODS, QUANT_METHOD
from clover_local.config import ModelConfig
from clover_local.errors import CheckpointError
from clover_local.kernels.packed import PackedWeight
from clover_local.quant.importers.foreign import METHODS, detect

SETTINGS = {"quant_method": "gptq", "bits": 8, "group_size": 16, "sym": True}
MODULE = "model.layers.1.mlp.experts.2."


def pack(module: str, matrix: Any) -> dict[str, Tensor]:
    """8-bit GPTQ: four bytes a word, a column after the other."""
    values = torch.from_numpy(matrix.values).to(torch.uint8)  # [N, K]
    zeros = torch.from_numpy(matrix.zeros.T - 1).to(torch.uint8).contiguous()  # [G, N]
    return {
        f"{module}.qweight": values.view(torch.int32).T,
        f"{module}.qzeros": zeros.view(torch.int32),
        f"{module}.scales": matrix.scale.T,
    }


def test_the_methods_are_those_that_the_runtime_says_can_be_imported() -> None:
    assert set(METHODS) == {*IMPORTED_METHODS, QUANT_METHOD}


@pytest.fixture
def folder(make_foreign: Callable[..., Any]) -> Any:
    """A folder in 8-bit GPTQ, as it should be."""
    return make_foreign(pack, SETTINGS, bits=8, group_size=16)


@pytest.mark.parametrize(
    ("config_json", "method"),
    [
        ({}, None),
        ({"quantization_config": None}, None),
        ({"quantization_config": {"quant_method": "awq"}}, "awq"),
        ({"quantization_config": {"quant_method": "fp8"}}, "fp8"),
        ({"quantization_config": {}}, "unknown"),
    ],
)
def test_method_is_what_the_config_says(config_json: dict[str, Any], method: str | None) -> None:
    assert detect(config_json) == method


@pytest.mark.parametrize("method", ["fp8", "bitsandbytes", "hqq", None])
def test_other_methods_are_refused_with_those_that_are_imported(
    folder: Any, method: str | None
) -> None:
    folder.settings["quant_method"] = method
    with pytest.raises(CheckpointError) as error:
        folder.open()
    assert f"quantized by {method} are not imported" in str(error.value)
    assert all(known in str(error.value) for known in METHODS)


@pytest.mark.parametrize("prefix", ["model.", "model.language_model."])
def test_both_prefixes_are_read(
    make_foreign: Callable[..., Any], require_equal: Callable[..., None], prefix: str
) -> None:
    folder = make_foreign(pack, SETTINGS, prefix=prefix, bits=8, group_size=16)
    foreign = folder.open()
    foreign.require_fit()
    assert foreign.prefix == prefix
    assert "layers.0.mlp.experts.0.up_proj.weight" in foreign.formats
    require_equal(foreign, foreign.config, folder.expected)


def test_unpacked_experts_are_read_beside_packed_ones(
    make_foreign: Callable[..., Any], require_equal: Callable[..., None]
) -> None:
    folder = make_foreign(pack, SETTINGS, packed=r"experts\.[0-4]\.", bits=8, group_size=16)
    foreign = folder.open()
    foreign.require_fit()
    require_equal(foreign, foreign.config, folder.expected)
    experts = foreign.read_experts(0, [1, 6])
    assert isinstance(experts.gate_up[0], PackedWeight)
    assert isinstance(experts.gate_up[1], Tensor)


def test_head_may_be_packed(
    make_foreign: Callable[..., Any], require_equal: Callable[..., None]
) -> None:
    folder = make_foreign(pack, SETTINGS, packed="lm_head", bits=8, group_size=16)
    foreign = folder.open()
    foreign.require_fit()
    assert isinstance(foreign.read_outer()["lm_head.weight"], PackedWeight)
    require_equal(foreign, foreign.config, folder.expected)


def test_tied_head_is_the_embedding(folder: Any) -> None:
    folder.values["tie_word_embeddings"] = True
    del folder.tensors["lm_head.weight"]
    foreign = folder.open()
    foreign.require_fit()
    outer = foreign.read_outer()
    assert outer["lm_head.weight"] is outer["embed_tokens.weight"]


def test_missing_diffusion_parameters_are_noted(folder: Any) -> None:
    for name in list(folder.tensors):
        if "bd_softmax" in name or "conv_right" in name:
            del folder.tensors[name]
    foreign = folder.open()
    foreign.require_fit()
    assert not foreign.has_diffusion
    assert any("only the mode ar" in note for note in foreign.notes)


def test_tensors_of_other_parts_are_noted(folder: Any) -> None:
    folder.tensors["mtp.layers.0.norm.weight"] = torch.ones(4)
    foreign = folder.open()
    foreign.require_fit()
    assert any("mtp.layers.0.norm.weight" in note for note in foreign.notes)


@pytest.mark.parametrize("name", ["layers.2.mlp.gate", "embed_tokens"])
def test_packed_matrix_that_the_runtime_needs_unquantized_is_refused(
    folder: Any, random_stored: Callable[..., Any], name: str
) -> None:
    shape = folder.tensors.pop(f"model.{name}.weight").shape
    folder.tensors |= pack(f"model.{name}", random_stored(*shape, bits=8, group_size=16))
    with pytest.raises(CheckpointError, match=f"runtime needs model.{name}.weight unquantized"):
        folder.open().require_fit()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("missing-plain", r"1 missing \(model.layers.0.input_layernorm.weight\)"),
        ("missing-packed", r"1 missing \(model.layers.1.mlp.experts.2.up_proj.weight\)"),
        ("surplus", r"1 surplus \(model.layers.9.bias\)"),
        ("bias", r"1 surplus \(model.layers.1.mlp.experts.2.up_proj.bias\)"),
        ("twice", r"up_proj.weight is there beside .*up_proj.qweight"),
        ("plain-dtype", r"input_layernorm.weight is I64 \[64\], expected BF16"),
        ("plain-shape", r"input_layernorm.weight is BF16 \[63\], expected .* \[64\]"),
        ("unlike", r"1 with gate and up in two formats \(layers.1.mlp.experts.gate_up_proj of"),
    ],
)
def test_every_problem_is_named(folder: Any, change: str, message: str) -> None:
    tensors = folder.tensors
    norm, up = "model.layers.0.input_layernorm.weight", MODULE + "up_proj."
    if change == "missing-plain":
        del tensors[norm]
    elif change == "missing-packed":
        for suffix in ("qweight", "qzeros", "scales"):
            del tensors[up + suffix]
    elif change == "surplus":
        tensors["model.layers.9.bias"] = torch.ones(1)
    elif change == "bias":
        tensors[up + "bias"] = torch.ones(32)
    elif change == "twice":
        tensors[up + "weight"] = torch.ones(32, 64)
    elif change == "plain-dtype":
        tensors[norm] = torch.ones(64, dtype=torch.int64)
    elif change == "plain-shape":
        tensors[norm] = tensors[norm][1:]
    else:
        for suffix in ("qweight", "qzeros", "scales"):
            del tensors[up + suffix]
        tensors[up + "weight"] = torch.ones(32, 64)
    with pytest.raises(CheckpointError, match=message):
        folder.open().require_fit()


def test_imported_weights_run(folder: Any, golden_config: ModelConfig) -> None:
    foreign = folder.open()
    attention = foreign.read_layer(3)["layers.3.self_attn.q_proj.weight"]
    assert isinstance(attention, PackedWeight)
    assert attention.data.is_contiguous()
    assert attention.shape == (2 * golden_config.num_attention_heads * golden_config.head_dim, 64)
