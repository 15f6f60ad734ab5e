"""The routing of a prompt: ids exactly, and every choice in its place."""

import pytest
import torch
from torch import Tensor

from clover_local.kernels.gpu.route_prompt import gate_cases, route_prompt_sorted
from clover_local.kernels.route import route


def expected_tiles(expert_ids: Tensor, *, experts: int, tile_rows: int) -> list[list[int]]:
    tiles, start = [], 0
    for expert, rows in enumerate(expert_ids.flatten().bincount(minlength=experts).tolist()):
        for done in range(0, rows, tile_rows):
            tiles.append([expert, start + done, min(tile_rows, rows - done), 0])
        start += rows
    return tiles


@pytest.mark.parametrize(
    ("rows", "experts", "top_k", "tile_rows", "dtype"),
    [
        (65, 24, 3, 32, torch.float32),
        (129, 24, 3, 64, torch.float16),
        (270, 256, 8, 32, torch.float32),
        (3, 7, 7, 2, torch.float32),
    ],
)
def test_prompt_routes_as_the_plain_operator(
    rows: int, experts: int, top_k: int, tile_rows: int, dtype: torch.dtype, device: str
) -> None:
    generator = torch.Generator().manual_seed(3)
    logits = ((torch.randn(rows, experts, generator=generator) * 6).round() / 4).to(dtype)
    expected = route(logits, top_k=top_k)
    got = route_prompt_sorted(logits.to(device), top_k=top_k, tile_rows=tile_rows)
    assert torch.equal(got.routing.expert_ids.cpu(), expected.expert_ids)
    torch.testing.assert_close(got.routing.weights.cpu(), expected.weights, atol=1e-6, rtol=1e-5)
    assert got.order.tolist() == expected.expert_ids.flatten().argsort(stable=True).tolist()
    tiles = expected_tiles(expected.expert_ids, experts=experts, tile_rows=tile_rows)
    count = int(got.tile_count)
    assert got.tiles[:count].tolist() == tiles
    assert not got.tiles[count:].any()


def test_one_expert_with_all_rows_has_many_tiles(device: str) -> None:
    logits = torch.zeros(70, 7, device=device)
    logits[:, 6] = 3
    got = route_prompt_sorted(logits, top_k=1, tile_rows=16)
    assert got.order.tolist() == list(range(70))
    assert got.tiles[: int(got.tile_count), :3].tolist() == [
        [6, 0, 16],
        [6, 16, 16],
        [6, 32, 16],
        [6, 48, 16],
        [6, 64, 6],
    ]


def test_wrong_calls_are_refused() -> None:
    with pytest.raises(ValueError, match="top_k is 9, there are 8 experts"):
        route_prompt_sorted(torch.zeros(4, 8), top_k=9)


def test_the_gate_has_three_kernels() -> None:
    assert [case.name for case in gate_cases()] == [
        "route prompt: rows",
        "route prompt: experts",
        "route prompt: choices",
    ]
