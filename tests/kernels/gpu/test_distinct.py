"""Counted in one launch: the number of the plain operator."""

import pytest
import torch
from torch import Tensor

from clover_local.kernels import route as plain
from clover_local.kernels.gpu.distinct import distinct_experts


def random_ids(layers: int, rows: int, *, top_k: int, experts: int, device: str) -> list[Tensor]:
    generator = torch.Generator().manual_seed(layers + rows)
    drawn = torch.randint(-1, experts, (layers, rows, top_k), generator=generator)
    return list(drawn.to(device))


@pytest.mark.parametrize(
    ("layers", "rows", "top_k", "experts"),
    [(1, 1, 1, 1), (3, 7, 3, 11), (40, 32, 8, 256), (7, 33, 8, 256), (2, 64, 8, 300)],
    ids=str,
)
def test_number_is_that_of_the_plain_operator(
    layers: int, rows: int, top_k: int, experts: int, device: str
) -> None:
    ids = random_ids(layers, rows, top_k=top_k, experts=experts, device=device)
    distinct = distinct_experts(ids, experts)
    assert distinct.dtype == torch.float64
    assert distinct.shape == ()
    assert float(distinct) == float(plain.distinct_experts(ids, experts))


def test_counter_is_zero_again_for_the_next_pass(device: str) -> None:
    ids = random_ids(5, 3, top_k=2, experts=9, device=device)
    counter = torch.zeros(1, dtype=torch.int64, device=device)
    counted = [float(distinct_experts(ids, 9, counter=counter)) for _ in range(2)]
    assert counted == 2 * [float(plain.distinct_experts(ids, 9))]
    assert int(counter) == 0


def test_rows_without_experts_count_for_nothing(device: str) -> None:
    ids = [torch.full((3, 2), -1, device=device) for _ in range(5)]
    assert float(distinct_experts(ids, 7)) == 0


def test_wrong_calls_are_refused() -> None:
    with pytest.raises(ValueError, match="0 layers"):
        distinct_experts([], 7)
    with pytest.raises(ValueError, match=r"1 layers of \['torch.int32'\]"):
        distinct_experts([torch.zeros(1, 1, dtype=torch.int32)], 7)
    with pytest.raises(ValueError, match="20000 experts, from 1 to 4096"):
        distinct_experts([torch.zeros(1, 1, dtype=torch.int64)], 20000)
    with pytest.raises(ValueError, match=r"counter is torch\.int32, not torch\.int64"):
        distinct_experts([torch.zeros(1, 1).long()], 7, counter=torch.zeros(1).int())
