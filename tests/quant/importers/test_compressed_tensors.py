"""pack-quantized files made by hand from the format's definition."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from clover_local.errors import CheckpointError, CloverError


def settings(**weights: Any) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "input_activations": None,
                "output_activations": None,
                "weights": {
                    "num_bits": 4,
                    "type": "int",
                    "symmetric": True,
                    "strategy": "group",
                    "group_size": 16,
                    "actorder": None,
                    "dynamic": False,
                    **weights,
                },
            }
        },
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "sparsity_config": {},
    }


def words(integers: "np.ndarray[Any, Any]", bits: int) -> Tensor:
    """Packs [N, K] along K, the first of a word in its lowest bits; fills up with zeros."""
    per_word = 32 // bits
    rows, columns = integers.shape
    packed = np.zeros((rows, -(-columns // per_word)), dtype=np.uint32)
    for column in range(columns):
        moved = integers[:, column].astype(np.uint32) << np.uint32(column % per_word * bits)
        packed[:, column // per_word] |= moved
    return torch.from_numpy(packed.view(np.int32))


def packer(*, symmetric: bool) -> Callable[..., dict[str, Tensor]]:
    def pack(module: str, matrix: Any) -> dict[str, Tensor]:
        tensors = {
            f"{module}.weight_packed": words(matrix.values, matrix.bits),
            f"{module}.weight_scale": matrix.scale,
            f"{module}.weight_shape": torch.tensor(matrix.values.shape),
        }
        if not symmetric:
            zeros = words(matrix.zeros.T, matrix.bits).T.contiguous()
            tensors[f"{module}.weight_zero_point"] = zeros
        return tensors

    return pack


@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "asymmetric"])
@pytest.mark.parametrize(
    ("weights", "made"),
    [
        ({}, {"group_size": 16}),
        ({"num_bits": 8, "group_size": 8}, {"bits": 8, "group_size": 8}),
        ({"actorder": "weight"}, {"group_size": 16, "dtype": torch.bfloat16}),
        (
            {"strategy": "channel", "group_size": None},
            {"packed": r"experts\.\d+\.(gate|up)_proj", "group_size": 64},
        ),
    ],
    ids=["4", "8", "static-order", "channel"],
)
def test_checkpoint_reads_as_the_weights_it_defines(
    make_foreign: Callable[..., Any],
    require_equal: Callable[..., None],
    weights: dict[str, Any],
    made: dict[str, Any],
    symmetric: bool,
) -> None:
    pack = packer(symmetric=symmetric)
    folder = make_foreign(
        pack, settings(symmetric=symmetric, **weights), symmetric=symmetric, **made
    )
    foreign = folder.open()
    foreign.require_fit()
    require_equal(foreign, foreign.config, folder.expected)
    layout = foreign.formats["layers.0.mlp.experts.1.gate_proj.weight"]
    assert layout.symmetric == symmetric
    assert layout.group_size == made["group_size"]


def test_two_config_groups_give_two_formats(
    make_foreign: Callable[..., Any],
    require_equal: Callable[..., None],
    random_stored: Callable[..., Any],
) -> None:
    folder = make_foreign(packer(symmetric=True), settings(), group_size=16)
    folder.settings["config_groups"]["group_1"] = settings(num_bits=8, group_size=32)[
        "config_groups"
    ]["group_0"]
    module = "model.layers.3.self_attn.q_proj"
    other = random_stored(256, 64, bits=8, group_size=32)
    folder.tensors |= packer(symmetric=True)(module, other)
    folder.expected["layers.3.self_attn.q_proj.weight"] = other.weight
    foreign = folder.open()
    foreign.require_fit()
    require_equal(foreign, foreign.config, folder.expected)
    assert foreign.formats["layers.3.self_attn.q_proj.weight"].bits == 8


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"num_bits": 3}, "num_bits is 3, imported are 4 and 8"),
        ({"type": "float"}, "type is 'float', imported is int"),
        ({"strategy": "tensor"}, "strategy is 'tensor', imported is group or channel"),
        ({"strategy": "block"}, "strategy is 'block'"),
        ({"actorder": "group"}, "actorder is 'group'"),
        ({"group_size": 0}, "group_size is 0"),
        ({"dynamic": True}, "dynamic is True"),
    ],
)
def test_unknown_weights_are_refused_by_name(
    make_foreign: Callable[..., Any], weights: dict[str, Any], message: str
) -> None:
    folder = make_foreign(packer(symmetric=True), settings(**weights), group_size=16)
    with pytest.raises(CloverError, match=message):
        folder.open()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "int-quantized"}, "format is 'int-quantized', imported is pack-quantized"),
        ({"format": "marlin-24"}, "format is 'marlin-24'"),
        ({"quantization_status": "frozen"}, "quantization_status is 'frozen'"),
        ({"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme asks for a quantized cache"),
        ({"sparsity_config": {"format": "sparse-24"}}, "sparse weights"),
        ({"config_groups": {}}, "config_groups is empty"),
        ({"config_groups": {"group_0": 3}}, "config_groups: 'group_0' is 3, expected an object"),
    ],
    ids=["format", "marlin", "status", "cache", "sparse", "no-groups", "odd-group"],
)
def test_unknown_settings_are_refused_by_name(
    make_foreign: Callable[..., Any], change: dict[str, Any], message: str
) -> None:
    folder = make_foreign(packer(symmetric=True), {**settings(), **change}, group_size=16)
    with pytest.raises(CloverError, match=message):
        folder.open()


def test_quantized_activations_are_refused(make_foreign: Callable[..., Any]) -> None:
    folder = make_foreign(packer(symmetric=True), settings(), group_size=16)
    folder.settings["config_groups"]["group_0"]["input_activations"] = {"num_bits": 8}
    with pytest.raises(CheckpointError, match="quantized activations"):
        folder.open()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("bits", "has 4 bits, config.json says 8"),
        ("odd-group", "group_size 24 does not divide its 64 columns"),
        ("group", "has 4 groups, config.json says another group_size"),
        ("act-order", "weight_g_idx is there, so its matrix has act-order"),
        ("shape", r"weight_shape says \[64, 32\], expected \[32, 64\]"),
        ("missing", "lacks .*weight_scale"),
    ],
)
def test_tensors_that_do_not_fit_are_problems(
    make_foreign: Callable[..., Any], change: str, message: str
) -> None:
    folder = make_foreign(packer(symmetric=True), settings(), group_size=16)
    weights = folder.settings["config_groups"]["group_0"]["weights"]
    module = "model.layers.1.mlp.experts.2.up_proj."
    if change == "bits":
        weights["num_bits"] = 8
    elif change == "odd-group":
        weights["group_size"] = 24
    elif change == "group":
        weights["group_size"] = 32
    elif change == "act-order":
        folder.tensors[module + "weight_g_idx"] = torch.zeros(64, dtype=torch.int32)
    elif change == "shape":
        folder.tensors[module + "weight_shape"] = torch.tensor([64, 32])
    else:
        del folder.tensors[module + "weight_scale"]
    with pytest.raises(CheckpointError, match=message):
        folder.open().require_fit()


@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "asymmetric"])
def test_zero_points_that_contradict_the_config_are_problems(
    make_foreign: Callable[..., Any], symmetric: bool
) -> None:
    folder = make_foreign(
        packer(symmetric=symmetric),
        settings(symmetric=not symmetric),
        symmetric=symmetric,
        group_size=16,
    )
    says = str(not symmetric).lower()
    with pytest.raises(CheckpointError, match=rf"zero points, config\.json says symmetric: {says}"):
        folder.open().require_fit()
