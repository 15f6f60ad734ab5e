"""What a GGUF file says of a model besides its tensors: the keys that llama.cpp reads."""

from collections.abc import Mapping

import numpy as np

from clover_local.config import GenerationConfig, ModelConfig
from clover_local.gguf.container import MetaValue
from clover_local.gguf.types import ARCHITECTURES
from clover_local.gguf.vocabulary import MASK_ID, SPECIAL_IDS, TEMPLATE

_REAL_SECTIONS = (11, 11, 10)  # of the real model's 32 rotating pairs
_QUANTIZATION_VERSION = 2  # of ggml's blocks


def model_metadata(
    config: ModelConfig, *, architecture: str, name: str, file_type: int
) -> dict[str, MetaValue]:
    """Sizes and settings of the graph.

    Raises:
        ValueError: an unknown architecture.
    """
    if architecture not in ARCHITECTURES:
        raise ValueError(f"architecture {architecture}, known are {', '.join(ARCHITECTURES)}")
    c = config
    sizes: dict[str, MetaValue] = {
        "block_count": c.num_hidden_layers,
        "context_length": c.max_position_embeddings,
        "embedding_length": c.hidden_size,
        "attention.head_count": c.num_attention_heads,
        "attention.head_count_kv": c.num_key_value_heads,
        "attention.key_length": c.head_dim,
        "attention.value_length": c.head_dim,
        "attention.layer_norm_rms_epsilon": c.rms_norm_eps,
        "attention.recurrent_layers": np.array(
            [not c.is_attention(layer) for layer in range(c.num_hidden_layers)]
        ),
        **_interval(c),
        "rope.freq_base": c.rope_theta,
        "rope.dimension_count": c.rotary_dim,
        "expert_count": c.num_experts,
        "expert_used_count": c.num_experts_per_tok,
        "expert_feed_forward_length": c.moe_intermediate_size,
        "expert_shared_feed_forward_length": c.shared_expert_intermediate_size,
        "ssm.conv_kernel": c.linear_conv_kernel_dim,
        "ssm.state_size": c.linear_key_head_dim,
        "ssm.group_count": c.linear_num_key_heads,
        "ssm.time_step_rank": c.linear_num_value_heads,
        "ssm.inner_size": c.linear_num_value_heads * c.linear_value_head_dim,
    }
    if architecture == ARCHITECTURES[0]:
        sizes["rope.dimension_sections"] = np.array(rope_sections(c), "<i4")
    else:
        sizes["expert_shared_count"] = 1
    return {
        "general.architecture": architecture,
        "general.type": "model",
        "general.name": name,
        "general.file_type": file_type,
        "general.quantization_version": _QUANTIZATION_VERSION,
        **{f"{architecture}.{key}": value for key, value in sizes.items()},
    }


def rope_sections(config: ModelConfig) -> tuple[int, ...]:
    """How rotating pairs are shared out among time, height, width; of text all count alike."""
    pairs, real = config.rotary_dim // 2, sum(_REAL_SECTIONS)
    first = -(-pairs * _REAL_SECTIONS[0] // real)
    second = min(-(-pairs * _REAL_SECTIONS[1] // real), pairs - first)
    return first, second, pairs - first - second, 0


def special_metadata(
    config: ModelConfig, generation: GenerationConfig, *, template: str | None
) -> dict[str, MetaValue]:
    """Special tokens and the chat template. llama.cpp takes 11 for an id that is absent."""
    ends = generation.eos_token_id or config.eos_token_id
    last = config.vocab_size - 1
    padding = generation.pad_token_id
    if padding is None:
        padding = config.pad_token_id if config.pad_token_id is not None else (*ends, last)[-1]
    metadata: dict[str, MetaValue] = {
        SPECIAL_IDS["eos_token"]: (*ends, padding)[0],
        SPECIAL_IDS["bos_token"]: padding,
        SPECIAL_IDS["pad_token"]: padding,
        MASK_ID: config.mask_token_id,
        "tokenizer.ggml.add_bos_token": False,
    }
    return metadata if template is None else {**metadata, TEMPLATE: template}


def _interval(config: ModelConfig) -> Mapping[str, MetaValue]:
    """Every how many layers one is attention, where that says it all."""
    layers = range(config.num_hidden_layers)
    for interval in range(1, config.num_hidden_layers + 1):
        if all(config.is_attention(layer) == ((layer + 1) % interval == 0) for layer in layers):
            return {"full_attention_interval": interval}
    return {}
