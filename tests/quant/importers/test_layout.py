"""What all importers check alike."""

from pathlib import Path
from typing import Any

import pytest

from clover_local.checkpoint.packed import Misfit
from clover_local.checkpoint.shards import TensorInfo
from clover_local.errors import CheckpointError
from clover_local.files import Reader
from clover_local.quant.importers import layout


def tensor(dtype: str, *shape: int) -> TensorInfo:
    return TensorInfo("q_proj.scales", dtype, shape, Path("model.safetensors"), 0, 0)


@pytest.mark.parametrize("bits", [2, 16])
def test_a_width_that_is_not_imported_is_named(bits: int) -> None:
    with pytest.raises(CheckpointError, match=f"bits is {bits}, imported are 4 and 8"):
        layout.read_bits(Reader("config", {"bits": bits}), "bits", known=(4, 8))


@pytest.mark.parametrize("size", [0, -2])
def test_a_group_size_that_cuts_nothing_is_refused(size: int) -> None:
    with pytest.raises(CheckpointError, match=f"group_size is {size}, expected a positive"):
        layout.read_group_size(Reader("config", {"group_size": size}), "group_size")


@pytest.mark.parametrize(("columns", "size", "groups"), [(96, 32, 3), (96, 96, 1), (64, -1, 1)])
def test_groups_are_whole(columns: int, size: int, groups: int) -> None:
    assert layout.groups_of("q_proj", columns, group_size=size) == groups


@pytest.mark.parametrize(
    ("columns", "size", "says"),
    [(96, 64, "64 does not divide its 96"), (40, -1, "40 columns in one group are no multiple")],
)
def test_columns_that_fill_no_groups_do_not_fit(columns: int, size: int, says: str) -> None:
    with pytest.raises(Misfit, match=says):
        layout.groups_of("q_proj", columns, group_size=size)


def test_a_missing_tensor_is_named() -> None:
    with pytest.raises(Misfit, match="q_proj lacks scales"):
        layout.required("q_proj", "scales", tensors={})


@pytest.mark.parametrize("found", [("I32", 3, 4), ("F16", 4, 3)], ids=str)
def test_floats_of_another_kind_or_shape_do_not_fit(found: Any) -> None:
    with pytest.raises(Misfit, match=r"expected BF16 or F16 or F32 \[3, 4\]"):
        layout.require_floats(tensor(*found), shape=(3, 4))


def test_a_word_holds_32_bits() -> None:
    assert (layout.per_word(4), layout.per_word(8)) == (8, 4)
