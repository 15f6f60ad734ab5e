"""The config and the response controls of a GGUF file, as `config.json` would have them."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from clover_local.config import (
    FULL_ATTENTION,
    LINEAR_ATTENTION,
    GenerationConfig,
    ModelConfig,
    parse_generation_config,
    parse_model_config,
)
from clover_local.errors import CheckpointError
from clover_local.gguf.container import GgufTensor, MetaValue
from clover_local.gguf.types import ARCHITECTURES
from clover_local.gguf.values import Values
from clover_local.gguf.vocabulary import MASK_ID, SPECIAL_IDS

_DEFAULT_BLOCK = 32
_DEFAULT_INTERVAL = 4  # llama.cpp's
_CONTROLS = "clover.generation."
_EOT = "tokenizer.ggml.eot_token_id"


def read_config(
    metadata: Mapping[str, MetaValue],
    tensors: Mapping[str, GgufTensor],
    *,
    controls: Mapping[str, MetaValue],
    source: str,
) -> tuple[ModelConfig, GenerationConfig]:
    """Both configs.

    Args:
        controls: the metadata that say what decoding needs: of the file, or of its sidecar.

    Raises:
        CheckpointError: another architecture, an absent or wrongly typed key.
        ConfigError: values that no model has.
    """
    values = Values(metadata, source)
    architecture = values.text("general.architecture")
    if architecture not in ARCHITECTURES:
        raise CheckpointError(
            f"{source} is a model of the architecture {architecture[:40]!r}, this runtime runs "
            f"{' and '.join(ARCHITECTURES)}: pass a GGUF file of Clover"
        )
    config = parse_model_config(
        {
            **_sizes(values, architecture, tensors, source),
            **_rope(values, architecture),
            **_special(values, Values(controls, source)),
            **_block(Values(controls, source), values, vocab_size=_vocab_size(tensors, source)),
        },
        source,
    )
    generation = {
        key.removeprefix(_CONTROLS): value.tolist() if isinstance(value, np.ndarray) else value
        for key, value in controls.items()
        if key.startswith(_CONTROLS)
    }
    return config, parse_generation_config(generation, config, source)


def _sizes(
    values: Values, architecture: str, tensors: Mapping[str, GgufTensor], source: str
) -> dict[str, Any]:
    def integer(key: str, *default: int) -> int:
        return values.integer(f"{architecture}.{key}", *default)

    layers = integer("block_count") - integer("nextn_predict_layers", 0)
    value_heads = integer("ssm.time_step_rank")
    inner = integer("ssm.inner_size")
    return {
        "model_type": "clover_moe",
        "vocab_size": _vocab_size(tensors, source),
        "hidden_size": integer("embedding_length"),
        "num_hidden_layers": layers,
        "layer_types": _layer_types(values, architecture, layers),
        "num_attention_heads": integer("attention.head_count"),
        "num_key_value_heads": integer("attention.head_count_kv"),
        "head_dim": integer("attention.key_length"),
        "linear_num_key_heads": integer("ssm.group_count"),
        "linear_num_value_heads": value_heads,
        "linear_key_head_dim": integer("ssm.state_size"),
        "linear_value_head_dim": inner // value_heads if value_heads > 0 else 0,
        "linear_conv_kernel_dim": integer("ssm.conv_kernel"),
        "num_experts": integer("expert_count"),
        "num_experts_per_tok": integer("expert_used_count"),
        "num_shared_experts": integer("expert_shared_count", 1),
        "moe_intermediate_size": integer("expert_feed_forward_length"),
        "shared_expert_intermediate_size": integer("expert_shared_feed_forward_length"),
        "rms_norm_eps": values.number(f"{architecture}.attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": integer("context_length"),
        "tie_word_embeddings": "output.weight" not in tensors,
    }


def _vocab_size(tensors: Mapping[str, GgufTensor], source: str) -> int:
    embedding = tensors.get("token_embd.weight")
    if embedding is None:
        raise CheckpointError(
            f"{source} holds no token_embd.weight: pass a model's file, or the first of several"
        )
    return embedding.shape[0]


def _layer_types(values: Values, architecture: str, layers: int) -> list[str]:
    interval = values.integer(f"{architecture}.full_attention_interval", _DEFAULT_INTERVAL)
    recurrent = values.flags(
        f"{architecture}.attention.recurrent_layers",
        [interval < 1 or (layer + 1) % interval != 0 for layer in range(max(0, min(layers, 1000)))],
    )
    return [LINEAR_ATTENTION if flag else FULL_ATTENTION for flag in recurrent[: max(layers, 0)]]


def _rope(values: Values, architecture: str) -> dict[str, Any]:
    """The rotary keys have no default: without them a model would be wrong and not say so."""
    base = values.number(f"{architecture}.rope.freq_base")
    rotating = values.integer(f"{architecture}.rope.dimension_count")
    head_dim = values.integer(f"{architecture}.attention.key_length")
    scaling = values.text(f"{architecture}.rope.scaling.type", "none")
    return {
        "rope_parameters": {
            "rope_theta": base,
            "partial_rotary_factor": rotating / head_dim if head_dim > 0 else 0.0,
            "rope_type": "default" if scaling == "none" else scaling,
        }
    }


def _special(values: Values, controls: Values) -> dict[str, Any]:
    """Stop ids: a file for llama.cpp names one, the controls all."""
    ends = [values.integer(key) for key in (SPECIAL_IDS["eos_token"], _EOT) if key in values]
    padding = SPECIAL_IDS["pad_token"]
    every = f"{_CONTROLS}eos_token_id"
    return {
        "eos_token_id": list(
            controls.integers(every) if every in controls else dict.fromkeys(ends)
        ),
        "pad_token_id": values.integer(padding) if padding in values else None,
    }


def _block(controls: Values, values: Values, *, vocab_size: int) -> dict[str, Any]:
    """What decoding by blocks needs; without diffusion parameters any numbers will do."""
    mask = values.integer(MASK_ID, vocab_size - 1)
    return {
        "block_size": controls.integer("clover.block_size", _DEFAULT_BLOCK),
        "mask_token_id": controls.integer("clover.mask_token_id", mask),
        "denoising_config": {"threshold": controls.number("clover.threshold", 0.95)},
        "moe_block_coreset_enabled": controls.flag("clover.coreset_enabled", False),
        "moe_block_coreset_top_p": controls.number("clover.coreset_top_p", 1.0),
    }
