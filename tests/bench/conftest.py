"""A small model for the GPU bench, and a card that is none."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from clover_local.bench.models import real_layers
from clover_local.config import ModelConfig
from clover_local.kernels.gpu.bench import Figure


class FakeCard:
    """Calls what it should time, once, and says times that were made up."""

    name = "a card"

    def __init__(self) -> None:
        self.seconds = 0.0

    def copy_rate(self) -> float:
        return 1e9

    def empty_graph(self) -> float:
        return 1e-5

    def experts(self) -> Figure:
        return Figure("INT4 experts", 32, 70, 2.0, 1_800_000_000, 5.0)

    def back_to_back(self, call: Callable[[], object]) -> float:
        call()
        return 0.3

    def graph(self, call: Callable[[], object]) -> float:
        call()
        return 0.1

    def now(self) -> float:
        self.seconds += 0.5
        return self.seconds


@pytest.fixture
def card() -> FakeCard:
    return FakeCard()


@pytest.fixture
def tiny_config() -> ModelConfig:
    """The real model's parts, as small as kernels take them: a GDN layer and one of attention."""
    return replace(
        real_layers(layers=4, experts=5, vocabulary=61, context=64),
        num_hidden_layers=2,
        layer_types=("linear_attention", "full_attention"),
        hidden_size=64,
        num_attention_heads=4,
        head_dim=16,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
        block_size=2,
    )
