"""The description of a GGUF file's model as the files that a checkpoint's folder has."""

from collections.abc import Mapping

from clover_local.config import MODEL_TYPE, GenerationConfig, ModelConfig
from clover_local.files import json_bytes
from clover_local.tokenizer import Tokenizer

_SAME = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "layer_types",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_conv_kernel_dim",
    "num_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "rms_norm_eps",
    "tie_word_embeddings",
    "max_position_embeddings",
    "block_size",
    "mask_token_id",
    "eos_token_id",
    "pad_token_id",
    "dtype",
)


def config_values(config: ModelConfig) -> dict[str, object]:
    """What `config.json` holds: parsing it gives `config` again."""
    return {
        "architectures": ["CloverMoeModelLM"],
        "model_type": MODEL_TYPE,
        **{name: _listed(getattr(config, name)) for name in _SAME},
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": config.rope_theta,
            "partial_rotary_factor": config.partial_rotary_factor,
        },
        "num_shared_experts": 1,
        "hidden_act": "silu",
        "attn_output_gate": True,
        "norm_topk_prob": True,
        "denoising_config": {"algorithm": "low_confidence", "threshold": config.threshold},
        "moe_block_coreset_enabled": config.coreset_enabled,
        "moe_block_coreset_top_p": config.coreset_top_p,
    }


def description(generation: GenerationConfig, tokenizer: Tokenizer) -> Mapping[str, bytes]:
    """The files beside the weights but for `config.json`, by name."""
    files = {
        "generation_config.json": json_bytes(generation.changes),
        "tokenizer.json": tokenizer.to_json().encode(),
        "tokenizer_config.json": json_bytes(tokenizer.special_tokens),
    }
    template = tokenizer.templates.get("default")
    return files if template is None else {**files, "chat_template.jinja": template.encode()}


def _listed(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value
