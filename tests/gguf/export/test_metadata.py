"""The keys that llama.cpp reads."""

from dataclasses import replace

import numpy as np
import pytest

from clover_local.config import GenerationConfig, ModelConfig
from clover_local.gguf.export.metadata import model_metadata, rope_sections, special_metadata


def test_the_real_model_has_every_key_with_its_value(real_config: ModelConfig) -> None:
    metadata = model_metadata(real_config, architecture="qwen35moe", name="Clover", file_type=15)
    arrays = {key: value for key, value in metadata.items() if isinstance(value, np.ndarray)}
    assert {key: value for key, value in metadata.items() if key not in arrays} == {
        "general.architecture": "qwen35moe",
        "general.type": "model",
        "general.name": "Clover",
        "general.file_type": 15,
        "general.quantization_version": 2,
        "qwen35moe.block_count": 40,
        "qwen35moe.context_length": 131072,
        "qwen35moe.embedding_length": 2048,
        "qwen35moe.attention.head_count": 16,
        "qwen35moe.attention.head_count_kv": 2,
        "qwen35moe.attention.key_length": 256,
        "qwen35moe.attention.value_length": 256,
        "qwen35moe.attention.layer_norm_rms_epsilon": 1e-6,
        "qwen35moe.full_attention_interval": 4,
        "qwen35moe.rope.freq_base": 1e7,
        "qwen35moe.rope.dimension_count": 64,
        "qwen35moe.expert_count": 256,
        "qwen35moe.expert_used_count": 8,
        "qwen35moe.expert_feed_forward_length": 512,
        "qwen35moe.expert_shared_feed_forward_length": 512,
        "qwen35moe.ssm.conv_kernel": 4,
        "qwen35moe.ssm.state_size": 128,
        "qwen35moe.ssm.group_count": 16,
        "qwen35moe.ssm.time_step_rank": 32,
        "qwen35moe.ssm.inner_size": 4096,
    }
    assert arrays["qwen35moe.rope.dimension_sections"].tolist() == [11, 11, 10, 0]
    recurrent = arrays["qwen35moe.attention.recurrent_layers"].tolist()
    assert recurrent == 10 * [True, True, True, False]
    assert len(arrays) == 2


def test_the_other_architecture_has_no_sections_and_says_one_shared_expert(
    real_config: ModelConfig,
) -> None:
    one, other = (
        model_metadata(real_config, architecture=name, name="Clover", file_type=15)
        for name in ("qwen35moe", "clover-moe")
    )
    renamed = {key.replace("qwen35moe", "clover-moe") for key in one}
    assert renamed - other.keys() == {"clover-moe.rope.dimension_sections"}
    assert other.keys() - renamed == {"clover-moe.expert_shared_count"}
    with pytest.raises(ValueError, match="architecture llama"):
        model_metadata(real_config, architecture="llama", name="Clover", file_type=15)


@pytest.mark.parametrize("pairs", [1, 2, 4, 8, 12, 32, 64])
def test_sections_add_up_to_the_rotating_pairs(pairs: int, golden_config: ModelConfig) -> None:
    config = replace(golden_config, head_dim=2 * pairs, partial_rotary_factor=1.0)
    sections = rope_sections(config)
    assert sum(sections) == pairs
    assert min(sections) >= 0


def test_irregular_layers_have_no_interval(odd_config: ModelConfig) -> None:
    metadata = model_metadata(odd_config, architecture="qwen35moe", name="x", file_type=0)
    assert "qwen35moe.full_attention_interval" not in metadata


def test_special_tokens_are_all_written(golden_config: ModelConfig) -> None:
    metadata = special_metadata(golden_config, GenerationConfig(), template="{{ x }}")
    assert metadata == {
        "tokenizer.ggml.eos_token_id": 507,
        "tokenizer.ggml.bos_token_id": 506,
        "tokenizer.ggml.padding_token_id": 506,
        "tokenizer.ggml.mask_token_id": 510,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": "{{ x }}",
    }
    bare = replace(golden_config, eos_token_id=(), pad_token_id=None)
    assert special_metadata(bare, GenerationConfig(), template=None)[
        "tokenizer.ggml.eos_token_id"
    ] == (511)
