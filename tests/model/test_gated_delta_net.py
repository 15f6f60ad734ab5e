"""The Gated DeltaNet layer by itself: who sees whom, and what stays as it was."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from clover_local.config import ModelConfig
from clover_local.kernels.gated_delta_commit import DeltaState
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
def state(config: ModelConfig) -> DeltaState:
    torch.manual_seed(9)
    c = config
    recurrent = torch.randn(
        c.linear_num_value_heads, c.linear_key_head_dim, c.linear_value_head_dim
    )
    return DeltaState(recurrent, torch.randn(c.linear_conv_kernel_dim - 1, c.qkv_dim))


def test_committed_row_sees_no_later_one(
    layer: GatedDeltaNet, state: DeltaState, config: ModelConfig
) -> None:
    torch.manual_seed(1)
    x = torch.randn(9, config.hidden_size)
    changed = x.clone()
    changed[5] += 1
    out, _ = layer.commit(x, state)
    other, _ = layer.commit(changed, state)
    torch.testing.assert_close(other[:5], out[:5])
    assert not any(torch.allclose(other[t], out[t]) for t in range(5, 9))


def test_previewed_row_sees_the_whole_block(
    layer: GatedDeltaNet, state: DeltaState, config: ModelConfig
) -> None:
    torch.manual_seed(2)
    x = torch.randn(9, config.hidden_size)
    changed = x.clone()
    changed[8] += 1
    out = layer.preview(x, state)
    other = layer.preview(changed, state)
    assert not any(torch.allclose(other[t], out[t], atol=1e-6) for t in range(9))


def test_given_states_stay_as_they_were(
    layer: GatedDeltaNet, state: DeltaState, config: ModelConfig
) -> None:
    torch.manual_seed(3)
    recurrent, conv = state.recurrent.clone(), state.conv.clone()
    for rows in (1, 2, 40):
        x = torch.randn(rows, config.hidden_size)
        layer.preview(x, state)
        _, after = layer.commit(x, state)
        assert not torch.equal(after.recurrent, recurrent)
        assert not torch.equal(after.conv, conv)
    assert torch.equal(state.recurrent, recurrent)
    assert torch.equal(state.conv, conv)


def test_new_state_goes_where_it_is_asked_to_go(
    layer: GatedDeltaNet, state: DeltaState, config: ModelConfig
) -> None:
    torch.manual_seed(5)
    x = torch.randn(6, config.hidden_size)
    into = DeltaState(torch.zeros_like(state.recurrent), torch.zeros_like(state.conv))
    out, after = layer.commit(x, state, into=into)
    assert (after.recurrent is into.recurrent) and (after.conv is into.conv)
    expected, new = layer.commit(x, state)
    assert torch.equal(out, expected)
    assert torch.equal(into.recurrent, new.recurrent)
    assert torch.equal(into.conv, new.conv)


def test_layer_without_diffusion_tensors_commits_and_refuses_to_preview(
    layer: GatedDeltaNet, take: Take, state: DeltaState, config: ModelConfig
) -> None:
    torch.manual_seed(4)
    causal = GatedDeltaNet(config, take, diffusion=None)
    x = torch.randn(3, config.hidden_size)
    out, _ = causal.commit(x, state)
    assert torch.equal(out, layer.commit(x, state)[0])
    with pytest.raises(ValueError, match="no diffusion tensors"):
        causal.preview(x, state)
