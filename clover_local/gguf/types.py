"""What a file may name: architectures, and the types of tensors.

A type's number in files and bytes a block are those of ggml (`ggml.h`). A row is cut into blocks of
`block` numbers that follow each other, so a row's length must be a multiple of it.
"""

from dataclasses import dataclass

from clover_local.checkpoint.packed import PackedFormat


@dataclass(frozen=True)
class TensorType:
    """A type by its number in the file; `block` numbers are stored in `nbytes` bytes."""

    name: str
    number: int
    block: int
    nbytes: int

    def row_bytes(self, columns: int) -> int:
        """Bytes of a row.

        Raises:
            ValueError: a row that is no whole number of blocks.
        """
        if columns % self.block:
            raise ValueError(f"{columns} columns, {self.name} has blocks of {self.block}")
        return columns // self.block * self.nbytes


TYPES = {
    name: TensorType(name, number, block, nbytes)
    for name, number, block, nbytes in (
        ("F32", 0, 1, 4),
        ("F16", 1, 1, 2),
        ("Q4_0", 2, 32, 18),
        ("Q4_1", 3, 32, 20),
        ("Q5_0", 6, 32, 22),
        ("Q5_1", 7, 32, 24),
        ("Q8_0", 8, 32, 34),
        ("Q2_K", 10, 256, 84),
        ("Q3_K", 11, 256, 110),
        ("Q4_K", 12, 256, 144),
        ("Q5_K", 13, 256, 176),
        ("Q6_K", 14, 256, 210),
        ("IQ2_XXS", 16, 256, 66),
        ("IQ2_XS", 17, 256, 74),
        ("IQ3_XXS", 18, 256, 98),
        ("IQ1_S", 19, 256, 50),
        ("IQ4_NL", 20, 32, 18),
        ("IQ3_S", 21, 256, 110),
        ("IQ2_S", 22, 256, 82),
        ("IQ4_XS", 23, 256, 136),
        ("I8", 24, 1, 1),
        ("I16", 25, 1, 2),
        ("I32", 26, 1, 4),
        ("I64", 27, 1, 8),
        ("F64", 28, 1, 8),
        ("IQ1_M", 29, 256, 56),
        ("BF16", 30, 1, 2),
        ("TQ1_0", 34, 256, 54),
        ("TQ2_0", 35, 256, 66),
        ("MXFP4", 39, 32, 17),
    )
}
TYPES_BY_NUMBER = {kind.number: kind for kind in TYPES.values()}
CLOVER_MOE = "clover-moe"
ARCHITECTURES = ("qwen35moe", CLOVER_MOE)  # one graph: llama.cpp's name, and its makers' newer one
PLAIN_TYPES = ("F32", "F16", "BF16")  # a number is a float, not an integer with a scale
PACKED_FORMATS = {  # what `load/decode.py` makes of a type
    "Q8_0": PackedFormat(8, 32, True, "F16"),
    "Q4_0": PackedFormat(4, 32, True, "F16"),
    "Q4_1": PackedFormat(4, 32, False, "F16"),
    "Q5_0": PackedFormat(8, 32, True, "F16"),
    "Q5_1": PackedFormat(8, 32, False, "F16"),
    "Q2_K": PackedFormat(4, 16, False, "F32"),
    "Q3_K": PackedFormat(4, 16, True, "F32"),
    "Q4_K": PackedFormat(4, 32, False, "F32"),
    "Q5_K": PackedFormat(8, 32, False, "F32"),
    "Q6_K": PackedFormat(8, 16, True, "F32"),
    "IQ4_NL": PackedFormat(8, 32, True, "F16"),
    "IQ4_XS": PackedFormat(8, 32, True, "F32"),
}
DECODED = (*PLAIN_TYPES, *PACKED_FORMATS)
