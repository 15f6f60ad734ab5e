"""The shared expert by the grouped kernels against the plain linear maps."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from clover_local.kernels.gpu.experts.record import ExpertSlots
from clover_local.kernels.gpu.experts.shared import every_row, shared_expert, shared_slots
from clover_local.kernels.packed import PackedWeight
from clover_local.kernels.packed_linear import packed_linear_reference

RoundMatrix = Callable[..., PackedWeight]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@dataclass(frozen=True, eq=False)
class Shared:
    gate: PackedWeight
    up: PackedWeight
    down: PackedWeight
    slots: ExpertSlots

    def reference(self, x: Tensor) -> Tensor:
        """In float32, on the CPU."""
        x = x.float().cpu()
        gate, up = (packed_linear_reference(x, weight) for weight in (self.gate, self.up))
        return packed_linear_reference(F.silu(gate) * up, self.down)


MakeShared = Callable[..., Shared]


@pytest.fixture
def shared(round_matrix: RoundMatrix, device: str) -> MakeShared:
    def make(
        hidden: int = 192,
        inner: int = 128,
        *,
        bits: int = 8,
        group_size: int = 64,
        down_group_size: int | None = None,
        asymmetric: bool = False,
    ) -> Shared:
        torch.manual_seed(1)
        gate, up, down = (
            round_matrix(
                torch.randn(n, k) * k**-0.5, bits=bits, group_size=group, asymmetric=asymmetric
            )
            for n, k, group in (
                (inner, hidden, group_size),
                (inner, hidden, group_size),
                (hidden, inner, down_group_size or group_size),
            )
        )
        slots = shared_slots(gate.to(device), up.to(device), down=down.to(device))
        return Shared(gate, up, down, slots)

    return make


def check_close(y: Tensor, expected: Tensor, *, dtype: torch.dtype) -> None:
    assert y.dtype == torch.float32
    tolerance = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 1e-2}[dtype]
    torch.testing.assert_close(y.cpu(), expected, rtol=tolerance, atol=tolerance)


def random_rows(rows: int, hidden: int, *, device: str, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(rows)
    return torch.randn(rows, hidden, generator=generator).to(device, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("bits", "hidden", "group_size"), [(8, 192, 64), (8, 384, 128), (4, 96, 32)]
)
def test_it_agrees_with_the_plain_linear_maps(
    bits: int, hidden: int, group_size: int, dtype: torch.dtype, shared: MakeShared, device: str
) -> None:
    expert = shared(hidden, bits=bits, group_size=group_size)
    x = random_rows(17, hidden, device=device, dtype=dtype)
    y = shared_expert(x, slots=expert.slots, every=every_row(17, device=device))
    check_close(y, expert.reference(x), dtype=dtype)


@pytest.mark.parametrize("rows", [1, 7, 16, 33, 70])
def test_any_number_of_rows_is_cut_into_tiles(rows: int, shared: MakeShared, device: str) -> None:
    expert = shared()
    x = random_rows(rows, 192, device=device, dtype=torch.float16)
    y = shared_expert(x, slots=expert.slots, every=every_row(rows, device=device))
    check_close(y, expert.reference(x), dtype=torch.float16)


@pytest.mark.parametrize("tile_rows", [8, 64])
def test_tiles_may_have_other_sizes(tile_rows: int, shared: MakeShared, device: str) -> None:
    expert = shared()
    x = random_rows(70, 192, device=device, dtype=torch.float16)
    every = every_row(70, device=device, tile_rows=tile_rows)
    y = shared_expert(x, slots=expert.slots, every=every)
    check_close(y, expert.reference(x), dtype=torch.float16)


def test_a_scale_for_each_row_is_a_group_of_all_its_columns(
    shared: MakeShared, device: str
) -> None:
    expert = shared(160, 96, group_size=160, down_group_size=96)
    assert expert.gate.scale.shape == (96, 1)
    x = random_rows(3, 160, device=device, dtype=torch.float32)
    y = shared_expert(x, slots=expert.slots, every=every_row(3, device=device))
    check_close(y, expert.reference(x), dtype=torch.float32)


def test_minima_are_taken_along(shared: MakeShared, device: str) -> None:
    expert = shared(bits=4, group_size=32, asymmetric=True)
    x = random_rows(3, 192, device=device, dtype=torch.float32)
    y = shared_expert(x, slots=expert.slots, every=every_row(3, device=device))
    check_close(y, expert.reference(x), dtype=torch.float32)


def test_results_are_written_where_the_caller_says(shared: MakeShared, device: str) -> None:
    expert, every = shared(), every_row(3, device=device)
    x = random_rows(3, 192, device=device, dtype=torch.float32)
    results = torch.full((3, 1, 192), torch.nan, device=device)
    y = shared_expert(x, slots=expert.slots, every=every, results=results)
    assert y.data_ptr() == results.data_ptr()
    assert torch.equal(y, shared_expert(x, slots=expert.slots, every=every))


def test_a_row_does_not_depend_on_the_rows_of_other_tiles(shared: MakeShared, device: str) -> None:
    expert = shared()
    x = random_rows(35, 192, device=device, dtype=torch.float32)
    whole = shared_expert(x, slots=expert.slots, every=every_row(35, device=device))
    rest = shared_expert(x[32:], slots=expert.slots, every=every_row(3, device=device))
    assert torch.equal(whole[32:], rest)


def test_every_row_is_in_one_tile() -> None:
    every = every_row(70, device="cpu")
    assert every.tiles.tolist() == [[0, 0, 32, 0], [0, 32, 32, 0], [0, 64, 6, 0]]
    assert every.tile_count.tolist() == [3]
    assert every.order.tolist() == list(range(70))
    assert (every.routing.expert_ids == 0).all()
    assert (every.routing.weights == 1).all()


def test_the_real_model_has_a_record_without_gaps() -> None:
    def zeros(n: int, k: int, group_size: int) -> PackedWeight:
        scale = torch.zeros(n, k // group_size, dtype=torch.bfloat16)
        return PackedWeight(torch.zeros(n, k // 4, dtype=torch.int32), scale, None, 8, group_size)

    for group_size in (64, 128):
        gate, down = zeros(512, 2048, group_size), zeros(2048, 512, group_size)
        slots = shared_slots(gate, gate, down=down)
        assert slots.records.shape == (1, 2 * gate.nbytes + down.nbytes)
        assert slots.slot_of_expert.tolist() == [0]


def test_weights_that_do_not_fit_are_refused(round_matrix: RoundMatrix) -> None:
    def matrix(n: int, k: int, *, bits: int = 8, group_size: int = 32) -> PackedWeight:
        return round_matrix(torch.randn(n, k), bits=bits, group_size=group_size)

    gate, down = matrix(64, 96), matrix(96, 64)
    with pytest.raises(ValueError, match=r"gate is MatrixFormat\(bits=8.*up MatrixFormat\(bits=4"):
        shared_slots(gate, matrix(64, 96, bits=4), down=down)
    with pytest.raises(ValueError, match=r"gate is \(64, 96\), up \(32, 96\)"):
        shared_slots(gate, matrix(32, 96), down=down)
    with pytest.raises(ValueError, match=r"down \(64, 96\)"):
        shared_slots(gate, gate, down=gate)
    with pytest.raises(ValueError, match="down has groups of 16, no multiple of 32"):
        shared_slots(gate, gate, down=matrix(96, 64, group_size=16))


def test_rows_that_do_not_fit_are_refused(shared: MakeShared, device: str) -> None:
    expert = shared()
    x = random_rows(33, 192, device=device, dtype=torch.float32)
    large = replace(every_row(33, device=device, tile_rows=64), tile_rows=32)
    with pytest.raises(ValueError, match="33 rows are in 1 tiles, not of 32 rows"):
        shared_expert(x, slots=expert.slots, every=large)
    with pytest.raises(ValueError, match="x has 33 rows, the routing 3"):
        shared_expert(x, slots=expert.slots, every=every_row(3, device=device))
    with pytest.raises(ValueError, match="0 rows in tiles of 32"):
        every_row(0, device=device)
