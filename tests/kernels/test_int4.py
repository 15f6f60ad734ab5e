"""The bit order of packed integers: pinned by hand, and undone by unpacking."""

import pytest
import torch

from clover_local.kernels.int4 import pack, unpack


def test_the_first_column_lies_in_the_lowest_bits() -> None:
    four = torch.tensor([[-8, -7, -6, -5, -4, -3, -2, -1], [0, 1, 2, 3, 4, 5, 6, 7]])
    assert pack(four, 4).tolist() == [[0x76543210], [0xFEDCBA98 - (1 << 32)]]
    eight = torch.tensor([[-128, -127, 0, 127]])
    assert pack(eight, 8).tolist() == [[0xFF800100 - (1 << 32)]]


@pytest.mark.parametrize("shape", [(8,), (1, 8), (5, 24), (2, 3, 16), (0, 8)], ids=str)
@pytest.mark.parametrize("bits", [4, 8])
def test_unpacking_undoes_packing(shape: tuple[int, ...], bits: int) -> None:
    half = 1 << (bits - 1)
    generator = torch.Generator().manual_seed(3)
    values = torch.randint(-half, half, shape, generator=generator, dtype=torch.int8)
    words = pack(values, bits)
    assert words.dtype == torch.int32
    assert words.shape == (*shape[:-1], shape[-1] * bits // 32)
    assert torch.equal(unpack(words, bits), values)


def test_strided_values_pack_in_column_order() -> None:
    values = torch.arange(-8, 8, dtype=torch.int8).repeat(3, 2)
    assert torch.equal(pack(values[:, ::2], 4), pack(values[:, ::2].clone(), 4))
    assert torch.equal(unpack(pack(values, 8)[:, ::2], 8)[:, :4], values[:, :4])


@pytest.mark.parametrize("bits", [4, 8])
def test_transposed_rows_pack_as_any_others(bits: int) -> None:
    column = torch.arange(-8, 8, dtype=torch.int8)[:, None]
    words = pack(column.T, bits)
    assert torch.equal(words, pack(column.T.clone(), bits))
    assert torch.equal(unpack(words.T.clone().T, bits), column.T)


@pytest.mark.parametrize(
    ("values", "bits", "complaint"),
    [
        (torch.zeros(3, 7), 4, "7 columns of 4 bits fill no whole words"),
        (torch.zeros(3, 6), 8, "6 columns of 8 bits fill no whole words"),
        (torch.full((1, 8), 8), 4, "values from 8 to 8, 4 bits hold -8 to 7"),
        (torch.full((1, 8), -129), 8, "values from -129 to -129, 8 bits hold -128 to 127"),
        (torch.zeros(1, 32), 3, "3 bits, the widths are 4 and 8"),
    ],
)
def test_what_cannot_be_packed_is_refused(values: torch.Tensor, bits: int, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        pack(values, bits)


def test_words_of_another_type_are_refused() -> None:
    with pytest.raises(ValueError, match=r"words are torch\.int64, not int32"):
        unpack(torch.zeros(2, 3, dtype=torch.int64), 4)
