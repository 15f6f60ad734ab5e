"""The mixture of experts: what it asks of the experts, and what it adds to their answer."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from clover_local.config import ModelConfig
from clover_local.experts.protocol import ExpertResults, Uncached
from clover_local.kernels.route import AnyRouting
from clover_local.model.moe import MoE


class Recorded(Uncached):
    """Experts that answer with zeros and remember what they were asked."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, Tensor, AnyRouting]] = []

    waits_because = "a test"

    def forward(self, layer: int, x: Tensor, *, routing: AnyRouting) -> ExpertResults:
        self.calls.append((layer, x, routing))
        return ExpertResults(torch.zeros(len(x), 1, x.shape[1]))


@pytest.fixture
def parameters(
    odd_config: ModelConfig, random_parameters: Callable[[ModelConfig], dict[str, Tensor]]
) -> dict[str, Tensor]:
    prefix = "layers.2.mlp."
    return {
        name.removeprefix(prefix): value
        for name, value in random_parameters(odd_config).items()
        if name.startswith(prefix)
    }


def moe_of(config: ModelConfig, parameters: dict[str, Tensor], *, experts: Recorded) -> MoE:
    return MoE(config, parameters.__getitem__, layer=2, experts=experts)


def test_experts_get_the_layer_the_rows_and_the_routing(
    odd_config: ModelConfig, parameters: dict[str, Tensor]
) -> None:
    torch.manual_seed(1)
    experts, x = Recorded(), torch.randn(7, odd_config.hidden_size)
    out = moe_of(odd_config, parameters, experts=experts).commit(x)
    ((layer, rows, routing),) = experts.calls
    assert layer == 2
    assert torch.equal(rows, x)
    best = (x @ parameters["gate.weight"].T).topk(3, dim=-1).indices
    assert torch.equal(routing.expert_ids, best)
    assert torch.equal(out.expert_ids, best)
    assert out.coreset is None


def test_shared_expert_is_added_through_its_own_gate(
    odd_config: ModelConfig, parameters: dict[str, Tensor]
) -> None:
    torch.manual_seed(2)
    x = torch.randn(5, odd_config.hidden_size)
    out = moe_of(odd_config, parameters, experts=Recorded()).commit(x).mixed.sum()
    gate, up, down = (
        parameters[f"shared_expert.{name}_proj.weight"] for name in ("gate", "up", "down")
    )
    shared = (F.silu(x @ gate.T) * (x @ up.T)) @ down.T
    expected = shared * (x @ parameters["shared_expert_gate.weight"].T).sigmoid()
    torch.testing.assert_close(out, expected)


def test_preview_uses_experts_of_its_coreset_only(
    odd_config: ModelConfig, parameters: dict[str, Tensor]
) -> None:
    torch.manual_seed(3)
    config = replace(odd_config, coreset_enabled=True, coreset_top_p=0.3)
    experts = Recorded()
    out = moe_of(config, parameters, experts=experts).preview(torch.randn(13, config.hidden_size))
    assert out.coreset is not None
    kept = out.coreset.nonzero()[:, 0].tolist()
    assert 0 < len(kept) < config.num_experts
    assert set(experts.calls[0][2].expert_ids.flatten().tolist()) - {-1} <= set(kept)


def test_preview_without_coresets_routes_as_a_commit(
    odd_config: ModelConfig, parameters: dict[str, Tensor]
) -> None:
    torch.manual_seed(4)
    config = replace(odd_config, coreset_enabled=False)
    x = torch.randn(13, config.hidden_size)
    moe = moe_of(config, parameters, experts=Recorded())
    previewed, committed = moe.preview(x), moe.commit(x)
    assert torch.equal(previewed.expert_ids, committed.expert_ids)
    assert torch.equal(previewed.mixed.sum(), committed.mixed.sum())
    assert previewed.coreset is None
