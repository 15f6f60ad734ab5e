"""Products with packed weights, by every kernel that this machine runs, against the definition."""

import ctypes
import mmap

import pytest
import torch
from torch import Tensor

from clover_local.kernels.native.build import AVX2, AVX512, CPU_INFO, Kernel, Missing, Target, build
from clover_local.kernels.native.launch import SCALE_KINDS, kernel_for
from clover_local.kernels.native.unpack import Variant
from clover_local.kernels.packed import PackedWeight
from clover_local.kernels.packed_linear import (
    packed_linear,
    packed_linear_native,
    packed_linear_reference,
)

FLAGS = set(CPU_INFO.read_text().split()) if CPU_INFO.exists() else set[str]()
TARGETS = [
    pytest.param(
        target,
        id=target.name,
        marks=pytest.mark.skipif(
            not FLAGS.issuperset(target.flags), reason=f"this CPU has no {target.name}"
        ),
    )
    for target in (AVX512, AVX2)
]
every_target = pytest.mark.parametrize("target", TARGETS)


def packed(
    rows: int,
    columns: int,
    *,
    bits: int,
    group_size: int,
    scale: torch.dtype = torch.bfloat16,
    minimum: bool = False,
) -> PackedWeight:
    generator = torch.Generator().manual_seed(rows)
    words, groups = columns * bits // 32, columns // group_size
    return PackedWeight(
        torch.randint(
            -(1 << 31), (1 << 31) - 1, (rows, words), generator=generator, dtype=torch.int32
        ),
        (0.5 + torch.rand(rows, groups, generator=generator)).to(scale) / (1 << bits),
        torch.randn(rows, groups, generator=generator) if minimum else None,
        bits,
        group_size,
    )


def kernel_of(weight: PackedWeight, target: Target) -> Kernel:
    variant = Variant(weight.bits, SCALE_KINDS[weight.scale.dtype], weight.minimum is None)
    kernel = build(variant, target)
    assert isinstance(kernel, Kernel)
    return kernel


def exact(x: Tensor, weight: PackedWeight) -> Tensor:
    return (x.double() @ weight.dequantize().double().T).float()


@every_target
@pytest.mark.parametrize("minimum", [False, True], ids=["symmetric", "minimum"])
@pytest.mark.parametrize("scale", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("bits", [4, 8])
def test_every_kind_of_weight_agrees_with_float64(
    bits: int, scale: torch.dtype, minimum: bool, target: Target
) -> None:
    torch.manual_seed(1)
    weight = packed(37, 192, bits=bits, group_size=32, scale=scale, minimum=minimum)
    kernel = kernel_of(weight, target)
    for rows in (1, 7):
        x = torch.randn(rows, 192)
        out = packed_linear_native(x, weight, kernel=kernel)
        torch.testing.assert_close(out, exact(x, weight), rtol=1e-5, atol=2e-5)


@every_target
@pytest.mark.parametrize(
    ("rows", "shape", "bits", "group_size"),
    [
        (1, (1, 32), 4, 32),
        (3, (2, 16), 8, 16),
        (5, (33, 96), 4, 96),  # one group a row
        (17, (31, 1056), 4, 32),
        (6, (5, 1120), 8, 1120),  # a group larger than what is unpacked at a time
        (130, (65, 640), 4, 128),  # more rows than a job has
        (70, (3, 17408), 8, 17408),  # a group too large for the scratch
    ],
    ids=lambda value: str(value),
)
def test_odd_sizes_agree_with_float64(
    rows: int, shape: tuple[int, int], bits: int, group_size: int, target: Target
) -> None:
    torch.manual_seed(2)
    weight = packed(*shape, bits=bits, group_size=group_size)
    x = torch.randn(rows, shape[1]) * shape[1] ** -0.5
    out = packed_linear_native(x, weight, kernel=kernel_of(weight, target))
    torch.testing.assert_close(out, exact(x, weight), rtol=1e-5, atol=1e-5)


@every_target
@pytest.mark.parametrize(("bits", "group_size"), [(4, 128), (8, 64)])
def test_bits_of_a_row_depend_on_nothing_beside_it(
    bits: int, group_size: int, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(3)
    weight = packed(101, 1152, bits=bits, group_size=group_size)
    kernel = kernel_of(weight, target)
    x = torch.randn(150, 1152)
    whole = packed_linear_native(x, weight, kernel=kernel)
    for rows in range(1, 14):
        part = packed_linear_native(x[5 : 5 + rows], weight, kernel=kernel)
        assert torch.equal(part, whole[5 : 5 + rows]), rows
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    assert torch.equal(packed_linear_native(x, weight, kernel=kernel), whole)
    assert torch.equal(packed_linear_native(x[:1], weight, kernel=kernel), whole[:1])


@pytest.mark.parametrize("bits", [4, 8])
def test_rows_may_be_strided_and_of_another_type(bits: int) -> None:
    torch.manual_seed(4)
    weight = packed(9, 128, bits=bits, group_size=64)
    wide = torch.randn(5, 256)
    plain = packed_linear(wide[:, :128].contiguous(), weight)
    assert torch.equal(packed_linear(wide[:, :128], weight), plain)
    assert torch.equal(
        packed_linear(wide[:, ::2], weight), packed_linear(wide[:, ::2].contiguous(), weight)
    )
    half = wide[:, :128].bfloat16()
    out = packed_linear(half, weight)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, packed_linear(half.float(), weight).bfloat16())


def test_no_rows_give_no_rows() -> None:
    weight = packed(9, 128, bits=4, group_size=64)
    assert packed_linear(torch.empty(0, 128), weight).shape == (0, 9)


@pytest.mark.parametrize("shape", [(3, 127), (128,), (1, 3, 128)], ids=str)
@pytest.mark.parametrize("choice", ["", "reference"], ids=["any kernel", "reference"])
def test_rows_of_another_width_are_refused(
    choice: str, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CLOVER_KERNELS", choice)
    weight = packed(9, 128, bits=4, group_size=64)
    with pytest.raises(ValueError, match=r"the weight \(9, 128\)"):
        packed_linear(torch.zeros(shape), weight)


def test_groups_that_no_kernel_knows_run_by_the_definition() -> None:
    torch.manual_seed(5)
    weight = packed(9, 72, bits=4, group_size=24)
    assert isinstance(kernel_for(weight), Missing)
    x = torch.randn(3, 72)
    assert torch.equal(packed_linear(x, weight), packed_linear_reference(x, weight))


def test_plain_torch_can_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(6)
    weight, x = packed(9, 128, bits=4, group_size=64), torch.randn(3, 128)
    monkeypatch.setenv("CLOVER_KERNELS", "reference")
    kernel = kernel_for(weight)
    assert isinstance(kernel, Missing)
    assert kernel.reason == "CLOVER_KERNELS=reference"
    assert torch.equal(packed_linear(x, weight), packed_linear_reference(x, weight))


@every_target
@pytest.mark.parametrize(("bits", "group_size"), [(4, 32), (8, 16)])
def test_nothing_behind_the_last_byte_is_read(bits: int, group_size: int, target: Target) -> None:
    torch.manual_seed(7)
    weight = packed(5, 96, bits=bits, group_size=group_size, minimum=True)
    assert weight.minimum is not None
    fenced = PackedWeight(
        at_the_end_of_a_page(weight.data),
        at_the_end_of_a_page(weight.scale),
        at_the_end_of_a_page(weight.minimum),
        bits,
        group_size,
    )
    kernel = kernel_of(weight, target)
    for rows in (1, 9):
        x = torch.randn(rows, 96)
        out = packed_linear_native(at_the_end_of_a_page(x), fenced, kernel=kernel)
        assert torch.equal(out, packed_linear_native(x, weight, kernel=kernel))


PAGES: list[mmap.mmap] = []  # stay mapped


def at_the_end_of_a_page(values: Tensor) -> Tensor:
    """A copy whose last byte is followed by memory that must not be read."""
    page = mmap.PAGESIZE
    pages = mmap.mmap(-1, 2 * page)
    PAGES.append(pages)
    start = ctypes.addressof(ctypes.c_char.from_buffer(pages))
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(start + page), page, 0) == 0
    copy = torch.frombuffer(
        pages, dtype=values.dtype, count=values.numel(), offset=page - values.nbytes
    ).view(values.shape)
    return copy.copy_(values)
