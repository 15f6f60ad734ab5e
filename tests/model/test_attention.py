"""The attention layer by itself: who sees whom, and what is written."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from clover_local.cache import SequenceState
from clover_local.config import ModelConfig
from clover_local.kernels.block_attention import KeysValues
from clover_local.kernels.norms import rotary_angles
from clover_local.model.attention import Angles, Attention


@pytest.fixture
def config(odd_config: ModelConfig) -> ModelConfig:
    return replace(odd_config, num_hidden_layers=1, layer_types=("full_attention",))


@pytest.fixture
def attention(
    config: ModelConfig, random_parameters: Callable[[ModelConfig], dict[str, Tensor]]
) -> Attention:
    parameters = random_parameters(config)
    return Attention(config, lambda name: parameters[f"layers.0.self_attn.{name}"], layer=0)


def cache_of(state: SequenceState, *, rows: int = 0) -> KeysValues:
    """The layer's cache, with room for new rows."""
    state.reserve(rows)
    return state.view().keys_values[0]


def angles(config: ModelConfig, start: int, *, rows: int) -> Angles:
    positions = torch.arange(start, start + rows)
    return Angles(*rotary_angles(positions, theta=config.rope_theta, rotary_dim=config.rotary_dim))


def test_committed_row_sees_no_later_one(
    attention: Attention, config: ModelConfig, empty_state: Callable[[ModelConfig], SequenceState]
) -> None:
    torch.manual_seed(1)
    x = torch.randn(9, config.hidden_size)
    changed = x.clone()
    changed[6] += 1
    out, other = (
        attention.commit(y, cache_of(empty_state(config), rows=9), angles=angles(config, 0, rows=9))
        for y in (x, changed)
    )
    torch.testing.assert_close(other[:6], out[:6])
    assert not any(torch.allclose(other[t], out[t]) for t in (6, 7, 8))


def test_previewed_row_sees_the_whole_block_and_what_is_committed(
    attention: Attention, config: ModelConfig, empty_state: Callable[[ModelConfig], SequenceState]
) -> None:
    torch.manual_seed(2)
    x = torch.randn(7, config.hidden_size)
    changed = x.clone()
    changed[6] += 1
    state = empty_state(config)
    before = attention.preview(x, cache_of(state), angles=angles(config, 0, rows=7))
    assert not torch.allclose(
        attention.preview(changed, cache_of(state), angles=angles(config, 0, rows=7))[0], before[0]
    )
    cache = cache_of(state, rows=3)
    attention.commit(torch.randn(3, config.hidden_size), cache, angles=angles(config, 0, rows=3))
    state.advance([4, 4, 4], recurrent=[], conv=[])
    after = attention.preview(x, cache_of(state), angles=angles(config, 3, rows=7))
    assert not torch.allclose(after[0], before[0])


def test_last_row_of_a_preview_equals_that_of_a_commit(
    attention: Attention, config: ModelConfig, empty_state: Callable[[ModelConfig], SequenceState]
) -> None:
    torch.manual_seed(3)
    x = torch.randn(8, config.hidden_size)
    state = empty_state(config)
    previewed = attention.preview(x, cache_of(state), angles=angles(config, 0, rows=8))
    committed = attention.commit(x, cache_of(state, rows=8), angles=angles(config, 0, rows=8))
    torch.testing.assert_close(previewed[-1], committed[-1])
    assert not torch.allclose(previewed[0], committed[0])
