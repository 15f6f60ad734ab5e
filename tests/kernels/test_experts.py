"""The routed experts against one row and one expert at a time."""

from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from clover_local.kernels.experts import ExpertMatrices, expert_mlp, gated
from clover_local.kernels.int4 import pack
from clover_local.kernels.linear import blocked_weight
from clover_local.kernels.packed import PackedWeight, Weight
from clover_local.kernels.route import Routing, route


def weights_of(experts: int, hidden: int, *, inner: int) -> tuple[list[Tensor], list[Tensor]]:
    torch.manual_seed(5)
    gate_up = torch.randn(experts, 2 * inner, hidden) * hidden**-0.5
    down = torch.randn(experts, hidden, inner) * inner**-0.5
    return list(gate_up), list(down)


def one_by_one(x: Tensor, routing: Routing, *, gate_up: list[Tensor], down: list[Tensor]) -> Tensor:
    total = torch.zeros(x.shape, dtype=torch.float64)
    for t, (ids, weights) in enumerate(zip(routing.expert_ids, routing.weights, strict=True)):
        for expert, weight in zip(ids.tolist(), weights.tolist(), strict=True):
            if expert >= 0:
                gate, up = (gate_up[expert].double() @ x[t].double()).chunk(2)
                total[t] += weight * (down[expert].double() @ (F.silu(gate) * up))
    return total.float()


@pytest.mark.parametrize("rows", [1, 2, 31, 150])
def test_rows_are_the_weighted_sum_of_their_experts(rows: int) -> None:
    gate_up, down = weights_of(11, 40, inner=28)
    x = torch.randn(rows, 40)
    routing = route(torch.randn(rows, 11), top_k=3)
    out = expert_mlp(x, routing, gate_up=gate_up, down=down)
    expected = one_by_one(x, routing, gate_up=gate_up, down=down)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


def test_a_choice_of_no_expert_adds_nothing_and_reads_no_other_row() -> None:
    gate_up, down = weights_of(4, 40, inner=28)
    x = torch.randn(3, 40)
    x[0] = torch.nan
    routing = Routing(
        torch.tensor([[2, 0], [3, -1], [1, -1]]), torch.tensor([[0.5, 0.5], [1.0, 0.0], [1.0, 0.0]])
    )
    out = expert_mlp(x, routing, gate_up=gate_up, down=down)
    assert out[0].isnan().all()
    expected = one_by_one(x, routing, gate_up=gate_up, down=down)
    torch.testing.assert_close(out[1:], expected[1:], rtol=1e-5, atol=1e-5)


def test_order_of_the_rows_does_not_change_a_bit() -> None:
    gate_up, down = ([blocked_weight(w) for w in part] for part in weights_of(5, 512, inner=520))
    x, logits = torch.randn(37, 512), torch.randn(37, 5)
    out = expert_mlp(x, route(logits, top_k=2), gate_up=gate_up, down=down)
    order = torch.randperm(37)
    moved = expert_mlp(x[order], route(logits[order], top_k=2), gate_up=gate_up, down=down)
    assert torch.equal(moved, out[order])


def test_choices_are_added_in_routing_order() -> None:
    # 1e8 + 1 - 1e8 is 0 in float32, 1e8 - 1e8 + 1 is 1: the order decides.
    one = torch.ones(1, 1)
    gate_up = [torch.tensor([[1.0], [value]]) for value in (1e8, 1.0, -1e8)]
    down = [one / F.silu(one)] * 3
    for ids, expected in (([0, 1, 2], 0.0), ([0, 2, 1], 1.0)):
        routing = Routing(torch.tensor([ids]), torch.ones(1, 3))
        out = expert_mlp(one, routing, gate_up=gate_up, down=down)
        assert out.item() == pytest.approx(expected)


def test_bfloat16_rows_are_summed_in_float32() -> None:
    gate_up, down = ([w.bfloat16() for w in part] for part in weights_of(6, 40, inner=28))
    x = torch.randn(9, 40).bfloat16()
    routing = route(torch.randn(9, 6), top_k=4)
    out = expert_mlp(x, routing, gate_up=gate_up, down=down)
    assert out.dtype == torch.float32
    expected = one_by_one(x, routing, gate_up=gate_up, down=down)
    torch.testing.assert_close(out, expected, rtol=0.01, atol=0.01)


def packed_experts(rows: int, columns: int, *, bits: int, group_size: int) -> list[PackedWeight]:
    torch.manual_seed(rows + bits)
    half = 1 << bits - 1
    return [
        PackedWeight(
            pack(torch.randint(-half, half, (rows, columns)), bits),
            (0.5 + torch.rand(rows, columns // group_size)).bfloat16() * (columns**-0.5 / half),
            None,
            bits,
            group_size,
        )
        for _ in range(7)
    ]


def plain(weights: Sequence[Weight]) -> list[Tensor]:
    return [w if isinstance(w, Tensor) else w.dequantize() for w in weights]


DOWN4 = packed_experts(96, 32, bits=4, group_size=32)
DOWN8 = packed_experts(96, 32, bits=8, group_size=32)


@pytest.mark.parametrize("rows", [1, 2, 33, 300])
@pytest.mark.parametrize("down", [DOWN4, DOWN8], ids=["down4", "down8"])
def test_packed_experts_agree_with_their_plain_values(rows: int, down: list[PackedWeight]) -> None:
    gate_up = packed_experts(64, 96, bits=4, group_size=32)
    x, routing = torch.randn(rows, 96), route(torch.randn(rows, 7), top_k=3)
    out = expert_mlp(x, routing, gate_up=gate_up, down=down)
    expected = one_by_one(x, routing, gate_up=plain(gate_up), down=plain(down))
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


def test_experts_of_a_layer_may_have_different_formats() -> None:
    mixed: list[Weight] = [
        *packed_experts(64, 96, bits=4, group_size=32)[:2],
        *packed_experts(64, 96, bits=8, group_size=16)[:2],
        *packed_experts(64, 96, bits=4, group_size=48)[:1],  # of a size that no kernel knows
        *plain(packed_experts(64, 96, bits=8, group_size=16)[2:4]),
    ]
    x, routing = torch.randn(41, 96), route(torch.randn(41, 7), top_k=3)
    out = expert_mlp(x, routing, gate_up=mixed, down=DOWN4)
    expected = one_by_one(x, routing, gate_up=plain(mixed), down=plain(DOWN4))
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    few = Routing(torch.tensor([[1, -1], [5, 0]]), torch.tensor([[1.0, 0.0], [0.5, 0.5]]))
    out = expert_mlp(x[:2], few, gate_up=mixed, down=DOWN4)
    expected = one_by_one(x[:2], few, gate_up=plain(mixed), down=plain(DOWN4))
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


def test_packed_rows_have_the_same_bits_in_any_company() -> None:
    gate_up = ExpertMatrices(packed_experts(64, 96, bits=4, group_size=32))
    down = ExpertMatrices(DOWN8)
    x, logits = torch.randn(37, 96), torch.randn(37, 7)
    out = expert_mlp(x, route(logits, top_k=2), gate_up=gate_up, down=down)
    order = torch.randperm(37)
    moved = expert_mlp(x[order], route(logits[order], top_k=2), gate_up=gate_up, down=down)
    assert torch.equal(moved, out[order])
    alone = expert_mlp(x[:1], route(logits[:1], top_k=2), gate_up=gate_up, down=down)
    assert torch.equal(alone, out[:1])


def test_rows_that_use_no_expert_get_zeros() -> None:
    gate_up = packed_experts(64, 96, bits=4, group_size=32)
    nobody = Routing(torch.full((3, 2), -1), torch.zeros(3, 2))
    x = torch.randn(3, 96)
    for convert in (list, plain):
        out = expert_mlp(x, nobody, gate_up=convert(gate_up), down=convert(DOWN4))
        assert torch.equal(out, torch.zeros(3, 96))


def test_a_row_has_the_same_bits_among_any_rows_and_threads() -> None:
    hidden = torch.randn(1400, 64, generator=torch.Generator().manual_seed(3))
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = torch.cat([gated(hidden[:700]), gated(hidden[700:])])
        torch.set_num_threads(2)
        for rows in range(1020, 1400, 7):  # 1025 rows are cut within the 512th
            assert torch.equal(gated(hidden[:rows]), alone[:rows])
    finally:
        torch.set_num_threads(before)
