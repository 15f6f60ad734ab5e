"""Resident experts: the right layer's weights, each in memory once."""

import weakref
from collections.abc import Iterator

import torch
from torch import Tensor

from clover_local.experts.resident import ResidentExperts
from clover_local.kernels.experts import expert_mlp
from clover_local.kernels.route import route


def weights(layer: int, *, inner: int = 28, hidden: int = 40) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(layer)
    return (
        torch.randn(5, 2 * inner, hidden, generator=generator),
        torch.randn(5, hidden, inner, generator=generator),
    )


def test_each_layer_runs_its_own_experts() -> None:
    torch.manual_seed(1)
    x, routing = torch.randn(7, 40), route(torch.randn(7, 5), top_k=2)
    experts = ResidentExperts([weights(0), weights(1)])
    for layer in (1, 0):
        gate_up, down = weights(layer)
        expected = expert_mlp(x, routing, gate_up=list(gate_up), down=list(down))
        assert torch.equal(experts.forward(layer, x, routing=routing).sum(), expected)


def test_large_experts_give_the_same_as_plain_ones() -> None:
    torch.manual_seed(2)
    gate_up, down = weights(3, inner=520, hidden=512)
    x, routing = torch.randn(9, 512) * 0.05, route(torch.randn(9, 5), top_k=3)
    out = ResidentExperts([(gate_up, down)]).forward(0, x, routing=routing).sum()
    expected = expert_mlp(x, routing, gate_up=list(gate_up), down=list(down))
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=2e-4)


def test_a_layer_handed_over_is_let_go_before_the_next_but_one() -> None:
    handed: list[weakref.ref[Tensor]] = []

    def layers() -> Iterator[tuple[Tensor, Tensor]]:
        for layer in range(3):
            assert not any(ref() is not None for ref in handed[:-1])
            pair = weights(layer, inner=520, hidden=512)
            handed.append(weakref.ref(pair[0]))
            yield pair
            del pair

    ResidentExperts(layers())
    assert len(handed) == 3
