"""The routing kernels against the plain operators: ids exactly, ties included; order and tiles."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from clover_local.kernels.gpu.route import (
    CONFIGS,
    RouteConfig,
    SortedRouting,
    gate_cases,
    route_coreset_sorted,
    route_sorted,
)
from clover_local.kernels.route import Routing, route, route_coreset


def router_logits(rows: int, experts: int, *, seed: int = 1) -> Tensor:
    """Logits in steps of a quarter, so that ties abound."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, experts, generator=generator) * 6).round() / 4


def check_equal(got: Routing, expected: Routing) -> None:
    assert torch.equal(got.expert_ids.cpu(), expected.expert_ids)
    torch.testing.assert_close(got.weights.cpu(), expected.weights, atol=1e-6, rtol=1e-5)


def check_order_and_tiles(got: SortedRouting, *, experts: int, tile_rows: int) -> None:
    flat = got.routing.expert_ids.flatten().cpu()
    used = int((flat >= 0).sum())
    order = torch.where(flat < 0, experts, flat).argsort(stable=True)
    assert got.order.tolist() == order.tolist()
    expected, start = [], 0
    for expert in range(experts):
        end = start + int((flat == expert).sum())
        while start < end:
            rows = min(tile_rows, end - start)
            expected.append([expert, start, rows, 0])
            start += rows
    assert start == used
    count = int(got.tile_count)
    assert got.tiles[:count].tolist() == expected
    assert not got.tiles[count:].any()


@pytest.mark.parametrize(
    ("rows", "experts", "top_k", "tile_rows"),
    [
        (1, 11, 3, 32),
        (1, 2, 1, 32),
        (1, 1, 1, 8),
        (7, 16, 4, 8),
        (16, 5, 5, 16),
        (17, 256, 8, 32),
        (33, 40, 8, 8),
        (64, 11, 2, 32),
    ],
)
def test_block_routes_as_the_plain_operator(
    rows: int, experts: int, top_k: int, tile_rows: int, device: str
) -> None:
    logits = router_logits(rows, experts)
    got = route_sorted(logits.to(device), top_k=top_k, tile_rows=tile_rows)
    check_equal(got.routing, route(logits, top_k=top_k))
    assert got.coreset is None
    check_order_and_tiles(got, experts=experts, tile_rows=tile_rows)


@pytest.mark.parametrize(
    ("rows", "experts", "top_k", "top_p"),
    [
        (1, 11, 3, 0.5),
        (7, 16, 4, 0.0),
        (7, 16, 4, 0.9),
        (32, 256, 8, 0.9),
        (33, 40, 8, 0.7),
        (33, 40, 8, 1.0),
    ],
)
def test_coreset_is_that_of_the_plain_operator(
    rows: int, experts: int, top_k: int, top_p: float, device: str
) -> None:
    logits = router_logits(rows, experts, seed=2)
    expected, coreset = route_coreset(logits, top_k=top_k, top_p=top_p)
    got = route_coreset_sorted(logits.to(device), top_k=top_k, top_p=top_p, tile_rows=16)
    assert got.coreset is not None
    assert torch.equal(got.coreset.cpu(), coreset)
    check_equal(got.routing, expected)
    check_order_and_tiles(got, experts=experts, tile_rows=16)


@pytest.mark.parametrize(("top_p", "kept"), [(0.5, 1), (0.51, 2), (0.75, 2), (0.76, 3), (9.0, 3)])
def test_coreset_is_cut_where_the_share_before_is_exact(
    top_p: float, kept: int, device: str
) -> None:
    # Totals 2, 1, 1, 0: shares 1/2, 1/4, 1/4, 0; experts 1 and 2 tie.
    logits = torch.zeros(4, 4, device=device)
    logits[range(4), [2, 0, 1, 0]] = 200.0
    got = route_coreset_sorted(logits, top_k=1, top_p=top_p)
    assert got.coreset is not None
    assert got.coreset.tolist() == [True] * kept + [False] * (4 - kept)


def test_coreset_is_cut_among_experts_that_many_rows_chose(device: str) -> None:
    # Totals of about 52, 7, 3 and 1, shares .83, .11, .05, .01: all but one are 2 or more.
    logits = torch.full((63, 5), -200.0, device=device)
    for expert, rows in enumerate((range(52), range(52, 59), range(59, 62), range(62, 63))):
        logits[list(rows), expert] = 0.0
    for top_p, kept in ((0.8, 1), (0.9, 2), (0.94, 3), (1.0, 4)):
        got = route_coreset_sorted(logits, top_k=1, top_p=top_p)
        assert got.coreset is not None
        assert got.coreset.tolist() == [True] * kept + [False] * (5 - kept)


def test_rows_with_fewer_experts_than_top_k_end_with_none(device: str) -> None:
    logits = torch.zeros(3, 6, device=device)
    logits[range(3), [4, 4, 1]] = 200.0
    got = route_coreset_sorted(logits, top_k=3, top_p=0.5)
    assert got.routing.expert_ids.tolist() == [[4, -1, -1]] * 3
    assert got.routing.weights.tolist() == [[1.0, 0.0, 0.0]] * 3
    assert got.order.tolist() == [0, 3, 6, 1, 2, 4, 5, 7, 8]
    assert got.tiles[: int(got.tile_count)].tolist() == [[4, 0, 3, 0]]


def test_one_expert_with_all_rows_has_many_tiles(device: str) -> None:
    logits = torch.zeros(37, 7, device=device)
    logits[:, 6] = 3
    got = route_sorted(logits, top_k=1, tile_rows=16)
    check_order_and_tiles(got, experts=7, tile_rows=16)
    assert int(got.tile_count) == 3


def test_logits_may_be_columns_of_a_wider_tensor(device: str) -> None:
    wide = router_logits(9, 12).to(device)
    got = route_sorted(wide[:, :11], top_k=3)
    check_equal(got.routing, route(wide[:, :11].cpu(), top_k=3))


def test_infinite_and_missing_numbers_keep_their_places(device: str) -> None:
    logits = torch.tensor([[0.0, torch.inf, -torch.inf, 1.0], [-0.0, 0.0, torch.nan, -torch.nan]])
    logits[1, 3] = -torch.inf
    got = route_sorted(logits.to(device), top_k=4).routing
    assert torch.equal(got.expert_ids.cpu(), route(logits, top_k=4).expert_ids)
    assert got.weights.isnan().all()


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: f"T{config.up_to_rows}")
def test_every_configuration_routes_alike(config: RouteConfig, device: str) -> None:
    logits = router_logits(5, 20)
    got = route_sorted(logits.to(device), top_k=3, config=config)
    check_equal(got.routing, route(logits, top_k=3))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: route_sorted(x[0], top_k=1), "[8]"),
        (lambda x: route_sorted(x.long(), top_k=1), "torch.int64"),
        (lambda x: route_sorted(x.T, top_k=1), "last stride of 8"),
        (lambda x: route_sorted(x, top_k=9), "top_k is 9, there are 8 experts"),
        (lambda x: route_sorted(x, top_k=1, tile_rows=0), "tile_rows is 0"),
        (
            lambda x: route_coreset_sorted(x.repeat(17, 1), top_k=1, top_p=0.5),
            "68 rows, at most 64",
        ),
    ],
)
def test_wrong_calls_are_refused(call: Callable[[Tensor], object], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        call(torch.zeros(4, 8))
    assert message in str(caught.value)


def test_the_gate_has_commits_and_previews() -> None:
    shapes = [(case.constexprs["CHOICES"], case.constexprs["HAS_CORESET"]) for case in gate_cases()]
    assert shapes == [(8, False), (256, False), (256, True), (512, True)]
