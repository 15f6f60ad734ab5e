"""A packed matrix in the headers: what its shapes mean, and every contradiction by name."""

from pathlib import Path

import pytest

from clover_local.checkpoint import packed
from clover_local.checkpoint.packed import Misfit, PackedFormat, match_packed
from clover_local.checkpoint.shards import TensorInfo
from clover_local.kernels import int4

Parts = dict[str, tuple[str, tuple[int, ...]]]


def match(parts: Parts, rows: int = 6, columns: int = 96) -> PackedFormat:
    """Matches a matrix `w` of whose tensors the dtypes and shapes are given."""
    tensors = {
        f"w_{part}": TensorInfo(f"w_{part}", dtype, shape, Path("a.safetensors"), 0, 0)
        for part, (dtype, shape) in parts.items()
    }
    info = match_packed("w", tensors, shape=(rows, columns))
    assert {part.name for part in info.parts} == tensors.keys()
    return info.format


def parts(**changes: tuple[str, tuple[int, ...]] | None) -> Parts:
    """Those of a symmetric INT4 g32 matrix [6, 96], changed; None: absent."""
    usual: dict[str, tuple[str, tuple[int, ...]] | None] = {
        "packed": ("I32", (6, 12)),
        "scale": ("BF16", (6, 3)),
        "shape": ("I64", (2,)),
    }
    return {part: value for part, value in (usual | changes).items() if value is not None}


def test_widths_are_those_of_the_bit_order() -> None:
    # This module needs no torch, so it cannot take them from there.
    assert (packed.BITS, packed.WORD_BITS) == (int4.BITS, int4.WORD_BITS)


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, PackedFormat(4, 32, True, "BF16")),
        ({"packed": ("I32", (6, 24))}, PackedFormat(8, 32, True, "BF16")),
        ({"scale": ("F16", (6, 4))}, PackedFormat(4, 24, True, "F16")),
        ({"scale": ("F32", (6, 1))}, PackedFormat(4, 96, True, "F32")),
        ({"shape": ("I32", (2,))}, PackedFormat(4, 32, True, "BF16")),
        ({"zero_point": ("I32", (1, 3))}, PackedFormat(4, 32, False, "BF16")),
        ({"min": ("F32", (6, 3))}, PackedFormat(4, 32, False, "BF16")),
    ],
    ids=["int4", "int8", "odd-group", "one-group", "shape-i32", "zero-point", "minimum"],
)
def test_bits_and_group_size_follow_from_the_shapes(changed: Parts, expected: PackedFormat) -> None:
    assert match(parts(**changed)) == expected


@pytest.mark.parametrize(
    ("changed", "complaint"),
    [
        ({"scale": None}, r"w_packed lacks w_scale"),
        ({"scale": None, "shape": None}, r"w_packed lacks w_scale and w_shape"),
        (
            {"packed": ("I32", (6, 18))},
            r"w_packed is I32 \[6, 18\], expected I32 \[6, 12\] \(4 bits\) or I32 \[6, 24\] \(8",
        ),
        ({"packed": ("U8", (6, 12))}, r"w_packed is U8 \[6, 12\], expected I32 \[6, 12\]"),
        ({"scale": ("BF16", (6, 5))}, r"w_scale is .*: 96 columns are not 5 equal groups"),
        ({"scale": ("BF16", (3, 6))}, r"w_scale is BF16 \[3, 6\], expected floats \[6, groups\]"),
        ({"scale": ("BF16", (6,))}, r"w_scale is BF16 \[6\], expected floats"),
        ({"scale": ("BF16", (6, 0))}, r"w_scale is BF16 \[6, 0\], expected floats"),
        ({"scale": ("F8_E4M3", (6, 3))}, r"w_scale is F8_E4M3 \[6, 3\], expected floats"),
        ({"shape": ("I64", (3,))}, r"w_shape is I64 \[3\], expected I64 \[2\]"),
        ({"zero_point": ("I32", (6, 3))}, r"w_zero_point is I32 \[6, 3\], expected I32 \[1, 3\]"),
        ({"min": ("BF16", (6, 3))}, r"w_min is BF16 \[6, 3\], expected F32 \[6, 3\]"),
        (
            {"min": ("F32", (6, 3)), "zero_point": ("I32", (1, 3))},
            r"w has both zero_point and min",
        ),
    ],
)
def test_contradictions_are_named(changed: Parts, complaint: str) -> None:
    with pytest.raises(Misfit, match=complaint):
        match(parts(**changed))


def test_columns_that_fill_no_whole_words_cannot_be_packed() -> None:
    with pytest.raises(Misfit, match="expected no packed matrix"):
        match(parts(), columns=97)


@pytest.mark.parametrize("found", [("I64", (3, 4)), ("I32", (4, 3))], ids=str)
def test_words_of_another_kind_or_shape_do_not_fit(found: tuple[str, tuple[int, ...]]) -> None:
    tensor = TensorInfo("w_packed", *found, Path("a.safetensors"), 0, 0)
    with pytest.raises(Misfit, match=r"expected I32 \[3, 4\]"):
        packed.require(tensor, "I32", (3, 4))
