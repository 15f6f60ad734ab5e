"""The real model's sizes, without a weight of it."""

from dataclasses import replace

import pytest

from clover_local.config import FULL_ATTENTION, LINEAR_ATTENTION, ModelConfig
from clover_local.memory.model_bytes import Formats, MatrixFormat, ModelBytes, from_config

INT8 = (MatrixFormat(8, 64), MatrixFormat(8, 32))


@pytest.fixture(scope="session")
def real_config(golden_config: ModelConfig) -> ModelConfig:
    """Clover-35B-A3B."""
    return replace(
        golden_config,
        vocab_size=248320,
        hidden_size=2048,
        num_hidden_layers=40,
        layer_types=(*[LINEAR_ATTENTION] * 3, FULL_ATTENTION) * 10,
        num_attention_heads=16,
        num_key_value_heads=2,
        head_dim=256,
        linear_num_key_heads=16,
        linear_num_value_heads=32,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        num_experts=256,
        num_experts_per_tok=8,
        moe_intermediate_size=512,
        shared_expert_intermediate_size=512,
        max_position_embeddings=131072,
        mask_token_id=248077,
    )


@pytest.fixture(scope="session")
def balanced() -> Formats:
    """INT4 experts in groups of 128, trunk and head INT8."""
    experts = MatrixFormat(4, 128)
    return Formats(experts, experts, INT8, INT8)


@pytest.fixture(scope="session")
def real_model(real_config: ModelConfig, balanced: Formats) -> ModelBytes:
    return from_config(real_config, balanced)


@pytest.fixture(scope="session")
def plain() -> Formats:
    """Nothing packed."""
    return Formats(MatrixFormat(16), MatrixFormat(16))
