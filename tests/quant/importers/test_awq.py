"""AWQ files made by hand from the format's definition."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from clover_local.errors import CheckpointError, CloverError
from clover_local.quant.importers.awq import packed_weight

SETTINGS = {
    "quant_method": "awq",
    "bits": 4,
    "group_size": 16,
    "zero_point": True,
    "version": "gemm",
    "modules_to_not_convert": ["mlp.gate"],
}


def words(integers: "np.ndarray[Any, Any]") -> Tensor:
    """Packs [R, N] along N: a word's nibbles, from the lowest, are outputs 0 2 4 6 1 3 5 7."""
    rows, outputs = integers.shape
    packed = np.zeros((rows, outputs // 8), dtype=np.uint32)
    for word in range(outputs // 8):
        for nibble, output in enumerate((0, 2, 4, 6, 1, 3, 5, 7)):
            column = integers[:, 8 * word + output].astype(np.uint32)
            packed[:, word] |= column << np.uint32(4 * nibble)
    return torch.from_numpy(packed.view(np.int32))


def pack(module: str, matrix: Any) -> dict[str, Tensor]:
    return {
        f"{module}.qweight": words(matrix.values.T),
        f"{module}.qzeros": words(matrix.zeros.T),
        f"{module}.scales": matrix.scale.T,
    }


@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "asymmetric"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["f16", "bf16"])
def test_weight_is_that_of_the_definition(
    random_stored: Callable[..., Any], symmetric: bool, dtype: torch.dtype
) -> None:
    matrix = random_stored(40, 72, group_size=24, symmetric=symmetric, dtype=dtype)
    tensors = pack("x", matrix)
    weight = packed_weight(tensors["x.qweight"], tensors["x.qzeros"], tensors["x.scales"])
    assert torch.equal(weight.dequantize().double(), matrix.weight)
    assert (weight.bits, weight.group_size, weight.scale.dtype) == (4, 24, dtype)


def test_one_word_pins_the_order_of_the_outputs() -> None:
    qweight = torch.tensor([[0x76543210]], dtype=torch.int32).repeat(8, 1)
    weight = packed_weight(
        qweight, torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, 8, dtype=torch.float16)
    )
    assert weight.dequantize()[:, 3].tolist() == [0, 4, 1, 5, 2, 6, 3, 7]


@pytest.mark.parametrize("version", ["gemm", "GEMM"])
def test_checkpoint_reads_as_the_weights_it_defines(
    make_foreign: Callable[..., Any], require_equal: Callable[..., None], version: str
) -> None:
    settings = {**SETTINGS, "version": version}
    folder = make_foreign(pack, settings, group_size=16, symmetric=False)
    foreign = folder.open()
    foreign.require_fit()
    require_equal(foreign, foreign.config, folder.expected)


def test_whole_columns_are_one_group(
    make_foreign: Callable[..., Any], require_equal: Callable[..., None]
) -> None:
    settings = {**SETTINGS, "group_size": -1}
    folder = make_foreign(pack, settings, packed=r"\.down_proj", group_size=32, symmetric=False)
    foreign = folder.open()
    foreign.require_fit()
    require_equal(foreign, foreign.config, folder.expected)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"version": "gemv"}, "version is 'gemv', only 'gemm' is imported"),
        ({"version": "gemv_fast"}, "version is 'gemv_fast'"),
        ({"version": "marlin"}, "version is 'marlin'"),
        ({"zero_point": False}, "zero_point is false"),
        ({"bits": 8}, "bits is 8, imported are 4"),
        ({"group_size": 0}, "group_size is 0"),
    ],
)
def test_unknown_settings_are_refused_by_name(
    make_foreign: Callable[..., Any], settings: dict[str, Any], message: str
) -> None:
    folder = make_foreign(pack, {**SETTINGS, **settings}, group_size=16)
    with pytest.raises(CloverError, match=message):
        folder.open()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("group_size", "group_size 24 does not divide its 64 columns"),
        ("missing", r"layers.1.mlp.experts.2.up_proj lacks qzeros"),
        ("dtype", r"up_proj.scales is I32 .* expected BF16 or F16 or F32"),
        ("shape", r"up_proj.qweight is I32 \[64, 3\], expected I32 \[64, 4\]"),
    ],
)
def test_tensors_that_do_not_fit_are_problems(
    make_foreign: Callable[..., Any], change: str, message: str
) -> None:
    folder = make_foreign(pack, SETTINGS, group_size=16)
    module = "model.layers.1.mlp.experts.2.up_proj."
    if change == "group_size":
        folder.settings["group_size"] = 24
    elif change == "missing":
        del folder.tensors[module + "qzeros"]
    elif change == "dtype":
        folder.tensors[module + "scales"] = folder.tensors[module + "scales"].int()
    else:
        folder.tensors[module + "qweight"] = folder.tensors[module + "qweight"][:, :3]
    with pytest.raises(CheckpointError, match=message):
        folder.open().require_fit()
