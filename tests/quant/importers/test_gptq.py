"""GPTQ files made by hand from the format's definition."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from clover_local.checkpoint.packed import Misfit
from clover_local.errors import CheckpointError, CloverError
from clover_local.quant.importers.gptq import packed_weight
from clover_local.quant.importers.layout import groups_of

SETTINGS = {"quant_method": "gptq", "bits": 4, "group_size": 16, "desc_act": False, "sym": True}


def words(integers: "np.ndarray[Any, Any]", bits: int) -> Tensor:
    """Packs along the first axis, the first of a word in its lowest bits."""
    per_word = 32 // bits
    packed = np.zeros((len(integers) // per_word, integers.shape[1]), dtype=np.uint32)
    for index, row in enumerate(integers):
        packed[index // per_word] |= row.astype(np.uint32) << np.uint32(index % per_word * bits)
    return torch.from_numpy(packed.view(np.int32))


def packer(*, version: int = 1, act_order: bool = False) -> Callable[..., dict[str, Tensor]]:
    def pack(module: str, matrix: Any) -> dict[str, Tensor]:
        zeros = matrix.zeros - (1 if version == 1 else 0)
        columns = matrix.values.shape[1]
        g_idx = torch.arange(columns, dtype=torch.int32) // matrix.group_size
        return {
            f"{module}.qweight": words(matrix.values.T, matrix.bits),
            f"{module}.qzeros": words(zeros, matrix.bits).T,
            f"{module}.scales": matrix.scale.T,
            f"{module}.g_idx": g_idx.flip(0) if act_order else g_idx,
        }

    return pack


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "asymmetric"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["f16", "bf16"])
def test_weight_is_that_of_the_definition(
    random_stored: Callable[..., Any], version: int, bits: int, symmetric: bool, dtype: torch.dtype
) -> None:
    matrix = random_stored(
        24,
        72,
        bits=bits,
        group_size=36,
        symmetric=symmetric,
        dtype=dtype,
        lowest_zero=1 if version == 1 else 0,
    )
    tensors = packer(version=version)("x", matrix)
    weight = packed_weight(
        tensors["x.qweight"],
        tensors["x.qzeros"].contiguous(),
        tensors["x.scales"],
        bits=bits,
        zero_offset=2 - version,
        symmetric=symmetric,
    )
    assert torch.equal(weight.dequantize().double(), matrix.weight)
    assert (weight.bits, weight.group_size, weight.scale.dtype) == (bits, 36, dtype)
    assert (weight.minimum is None) == symmetric


def test_one_word_pins_the_order_of_the_bits() -> None:
    qweight = torch.tensor([[0x76543210]], dtype=torch.int32).repeat(1, 8)
    weight = packed_weight(
        qweight,
        torch.tensor([[0x77777777]], dtype=torch.int32),
        torch.ones(1, 8, dtype=torch.float16),
        bits=4,
        zero_offset=1,
        symmetric=True,
    )
    assert weight.dequantize()[5].tolist() == [-8, -7, -6, -5, -4, -3, -2, -1]


@pytest.mark.parametrize(
    ("settings", "made"),
    [
        ({}, {}),
        ({"checkpoint_format": "gptq", "desc_act": True}, {}),
        ({"checkpoint_format": "gptq_v2"}, {"version": 2}),
        ({"sym": False}, {"symmetric": False, "lowest_zero": 1}),
        ({"checkpoint_format": "gptq_v2", "sym": False}, {"version": 2, "symmetric": False}),
        ({"bits": 8, "group_size": 8}, {"bits": 8, "group_size": 8}),
        ({"group_size": -1}, {"packed": r"experts\.\d+\.(gate|up)_proj", "group_size": 64}),
        ({"dynamic": {"+:.*": {"bits": 8}}}, {"bits": 8, "group_size": 4}),
    ],
    ids=["v1", "desc-act-in-order", "v2", "asymmetric", "v2-asymmetric", "8", "whole", "dynamic"],
)
def test_checkpoint_reads_as_the_weights_it_defines(
    make_foreign: Callable[..., Any],
    require_equal: Callable[..., None],
    settings: dict[str, Any],
    made: dict[str, Any],
) -> None:
    made = {"group_size": 16, **made}
    pack = packer(version=made.pop("version", 1))
    folder = make_foreign(pack, {**SETTINGS, **settings}, **made)
    foreign = folder.open()
    foreign.require_fit()
    require_equal(foreign, foreign.config, folder.expected)
    layout = foreign.formats["layers.2.mlp.experts.5.up_proj.weight"]
    assert (layout.bits, layout.group_size) == (made.get("bits", 4), made["group_size"])
    assert layout.symmetric == made.get("symmetric", True)
    assert "layers.0.mlp.gate.weight" not in foreign.formats


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"bits": 3}, "bits is 3, imported are 4 and 8"),
        ({"bits": 2}, "bits is 2"),
        ({"group_size": 0}, "group_size is 0, expected a positive number or -1"),
        ({"group_size": -7}, "group_size is -7"),
        ({"bits": None}, "lacks the key 'bits'"),
        ({"checkpoint_format": "marlin"}, "checkpoint_format is 'marlin'"),
        ({"sym": 1}, "'sym' is 1, expected true or false"),
    ],
)
def test_unknown_settings_are_refused_by_name(
    make_foreign: Callable[..., Any], settings: dict[str, Any], message: str
) -> None:
    folder = make_foreign(packer(), {**SETTINGS, **settings}, group_size=16)
    with pytest.raises(CloverError, match=message):
        folder.open()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"group_size": 48}, "group_size 48 does not divide its 64 columns"),
        ({"group_size": 32}, r"qzeros is I32 \[4, 32\], expected I32 \[2, 32\]"),
        ({"bits": 8}, r"qweight is I32 \[8, 256\], expected I32 \[16, 256\]"),
        ({"group_size": -1}, r"qzeros is I32 \[4, 32\], expected I32 \[1, 32\]"),
    ],
    ids=["odd-group", "another-group", "another-width", "whole-column"],
)
def test_settings_that_contradict_the_tensors_are_problems(
    make_foreign: Callable[..., Any], settings: dict[str, Any], message: str
) -> None:
    folder = make_foreign(packer(), {**SETTINGS, **settings}, group_size=16)
    foreign = folder.open()
    with pytest.raises(CheckpointError, match=message) as error:
        foreign.require_fit()
    assert str(error.value).endswith("or quantize its BF16 weights")


@pytest.mark.parametrize("desc_act", [True, False])
def test_act_order_is_refused_by_name(make_foreign: Callable[..., Any], desc_act: bool) -> None:
    pack = packer(act_order=True)
    folder = make_foreign(pack, {**SETTINGS, "desc_act": desc_act}, group_size=16)
    with pytest.raises(CheckpointError, match="act-order"):
        folder.open().require_fit()


def test_act_order_without_its_groups_is_refused(make_foreign: Callable[..., Any]) -> None:
    folder = make_foreign(packer(), {**SETTINGS, "desc_act": True}, group_size=16)
    for name in [name for name in folder.tensors if name.endswith("g_idx")]:
        del folder.tensors[name]
    with pytest.raises(CheckpointError, match="lacks g_idx, which act-order needs"):
        folder.open().require_fit()
    folder.settings["desc_act"] = False
    folder.open().require_fit()


def test_zeros_that_contradict_sym_are_named(make_foreign: Callable[..., Any]) -> None:
    folder = make_foreign(packer(version=2), SETTINGS, group_size=16)
    foreign = folder.open()  # version 2, read as 1
    foreign.require_fit()
    with pytest.raises(CheckpointError, match="has a zero point other than 8 though"):
        foreign.read_layer(3)


def test_whole_column_of_odd_length_is_refused() -> None:
    with pytest.raises(Misfit, match="40 columns in one group are no multiple of 32"):
        groups_of("x", 40, group_size=-1)
