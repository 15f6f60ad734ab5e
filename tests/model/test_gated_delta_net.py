"""The Gated DeltaNet layer by itself: who sees whom, and what stays as it was."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from clover_local.config import ModelConfig
from clover_local.model.gated_delta_net import GatedDeltaNet, take_diffusion

Take = Callable[[str], Tensor]


@pytest.fixture
def config(odd_config: ModelConfig) -> ModelConfig:
    return replace(odd_config, num_hidden_layers=1, layer_types=("linear_attention",))


@pytest.fixture
def take(
    config: ModelConfig, random_parameters: Callable[[ModelConfig], dict[str, Tensor]]
) -> Take:
    parameters = random_parameters(config)
    return lambda name: parameters[f"layers.0.linear_attn.{name}"]


@pytest.fixture
def layer(config: ModelConfig, take: Take) -> GatedDeltaNet:
    return GatedDeltaNet(config, take, diffusion=take_diffusion(take))


@pytest.fixture
def states(config: ModelConfig) -> tuple[Tensor, Tensor]:
    torch.manual_seed(9)
    c = config
    recurrent = torch.randn(
        c.linear_num_value_heads, c.linear_key_head_dim, c.linear_value_head_dim
    )
    return recurrent, torch.randn(c.linear_conv_kernel_dim - 1, c.qkv_dim)


def test_committed_row_sees_no_later_one(
    layer: GatedDeltaNet, states: tuple[Tensor, Tensor], config: ModelConfig
) -> None:
    torch.manual_seed(1)
    x = torch.randn(9, config.hidden_size)
    changed = x.clone()
    changed[5] += 1
    out, _, _ = layer.commit(x, states[0], conv_state=states[1])
    other, _, _ = layer.commit(changed, states[0], conv_state=states[1])
    torch.testing.assert_close(other[:5], out[:5])
    assert not any(torch.allclose(other[t], out[t]) for t in range(5, 9))


def test_previewed_row_sees_the_whole_block(
    layer: GatedDeltaNet, states: tuple[Tensor, Tensor], config: ModelConfig
) -> None:
    torch.manual_seed(2)
    x = torch.randn(9, config.hidden_size)
    changed = x.clone()
    changed[8] += 1
    out = layer.preview(x, states[0], conv_state=states[1])
    other = layer.preview(changed, states[0], conv_state=states[1])
    assert not any(torch.allclose(other[t], out[t], atol=1e-6) for t in range(9))


def test_given_states_stay_as_they_were(
    layer: GatedDeltaNet, states: tuple[Tensor, Tensor], config: ModelConfig
) -> None:
    torch.manual_seed(3)
    before = [x.clone() for x in states]
    for rows in (1, 2, 40):
        x = torch.randn(rows, config.hidden_size)
        layer.preview(x, states[0], conv_state=states[1])
        _, recurrent, conv = layer.commit(x, states[0], conv_state=states[1])
        assert not torch.equal(recurrent, before[0])
        assert not torch.equal(conv, before[1])
    assert torch.equal(states[0], before[0])
    assert torch.equal(states[1], before[1])


def test_layer_without_diffusion_tensors_commits_and_refuses_to_preview(
    layer: GatedDeltaNet, take: Take, states: tuple[Tensor, Tensor], config: ModelConfig
) -> None:
    torch.manual_seed(4)
    causal = GatedDeltaNet(config, take, diffusion=None)
    x = torch.randn(3, config.hidden_size)
    out, _, _ = causal.commit(x, states[0], conv_state=states[1])
    assert torch.equal(out, layer.commit(x, states[0], conv_state=states[1])[0])
    with pytest.raises(ValueError, match="no diffusion tensors"):
        causal.preview(x, states[0], conv_state=states[1])
