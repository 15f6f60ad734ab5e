"""`config.json` and `generation_config.json` as frozen dataclasses; needs no torch.

Field names are those of the files. Keys that nothing here reads are kept by name (`unknown_keys`)
so that `clover-local info` can list them; a missing or wrongly typed key is an error that names it.
"""

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from clover_local.errors import ConfigError
from clover_local.files import (
    Reader,
    as_context,
    as_factor,
    as_flag,
    as_integer,
    as_layer_count,
    as_number,
    as_object,
    as_size,
    as_strength,
    as_text,
    as_texts,
    as_token_id,
    as_token_ids,
    read_json_object,
)

MODEL_TYPE = "clover_moe"
UNFINISHED_NAME = ".quantize"  # the work folder in a destination that `quantize` has not finished
FULL_ATTENTION = "full_attention"
LINEAR_ATTENTION = "linear_attention"

# Keys that describe the file or its training and change nothing in a forward pass.
_INERT_KEYS = re.compile(
    "architectures|model_type|text_config|torch_dtype|dtype|transformers_version|use_cache|"
    "initializer_range|attention_dropout|attention_bias|router_aux_loss_coef|bos_token_id|"
    "output_router_logits|_name_or_path|decoder_sparse_step|mlp_only_layers|mamba_ssm_dtype"
)
_ROPE_KEYS = ("rope_theta", "partial_rotary_factor")

# Bounds far beyond any real model, as those of `files`.
MOST_EXPERTS = 10_000
MOST_BLOCK_ROWS = 4096


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a Clover model, named as in `config.json`."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    layer_types: tuple[str, ...]
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rope_theta: float
    partial_rotary_factor: float
    linear_num_key_heads: int
    linear_num_value_heads: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    linear_conv_kernel_dim: int
    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    shared_expert_intermediate_size: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    max_position_embeddings: int
    block_size: int
    mask_token_id: int
    threshold: float
    coreset_enabled: bool
    coreset_top_p: float
    eos_token_id: tuple[int, ...]
    pad_token_id: int | None
    dtype: str
    stop_token_ids: tuple[int, ...] = ()
    quant_method: str | None = None
    quant_format: str | None = None
    unknown_keys: tuple[str, ...] = ()

    @property
    def rotary_dim(self) -> int:
        """How many of `head_dim` dimensions rotate."""
        return int(self.head_dim * self.partial_rotary_factor)

    @property
    def qkv_dim(self) -> int:
        """Channels of a GDN layer's convolution: queries, keys, values."""
        key_dim = self.linear_num_key_heads * self.linear_key_head_dim
        return 2 * key_dim + self.linear_num_value_heads * self.linear_value_head_dim

    def is_attention(self, layer: int) -> bool:
        """Whether layer `layer` (from 0) is full attention, not Gated DeltaNet."""
        return self.layer_types[layer] == FULL_ATTENTION


@dataclass(frozen=True)
class GenerationConfig:
    """The response controls that a checkpoint ships; the defaults change nothing."""

    eos_token_id: tuple[int, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None
    suppress_tokens: tuple[int, ...] = ()
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    dllm_length_penalty: float = 0.0
    dllm_length_penalty_start: int = 8192
    dllm_length_penalty_window: int = 8192
    dllm_think_end_bias: float = 0.0
    dllm_think_end_start: int = 4096
    dllm_think_end_window: int = 4096
    dllm_think_end_token_id: int | None = None
    given: frozenset[str] = field(default=frozenset(), compare=False)
    """The keys that the file really had: `/show` says where a value came from."""

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Every id that ends an answer: EOS ids, stop ids and pad id, distinct, ascending."""
        pad = () if self.pad_token_id is None else (self.pad_token_id,)
        return tuple(sorted({*self.eos_token_id, *self.stop_token_ids, *pad}))

    @property
    def changes(self) -> dict[str, Any]:
        """The controls that differ from the defaults, by their keys in the file."""
        return {
            each.name: value
            for each in fields(self)
            if each.compare and (value := getattr(self, each.name)) != each.default
        }


def read_model_config(folder: Path) -> ModelConfig:
    """The model's shape, from `config.json`.

    Raises:
        ConfigError: missing or unreadable file, another model type, a missing or wrongly typed key,
            sizes that do not fit together.
    """
    path = folder / "config.json"
    if not os.path.lexists(path) and (folder / UNFINISHED_NAME).is_dir():
        raise ConfigError(
            f"{folder} is unfinished: run the same `clover-local quantize` again to finish it"
        )
    return parse_model_config(read_json_object(path), str(path))


def parse_model_config(values: Mapping[str, Any], source: str) -> ModelConfig:
    """As `read_model_config`, for an object that is read already; `source` names it in errors."""
    top = Reader(source, values)
    text = Reader(source, {**values, **top.get("text_config", as_object, {})})
    model_type = (top if "model_type" in values else text).get("model_type", as_text)
    if model_type != MODEL_TYPE:
        raise ConfigError(
            f"{source}: model_type is {model_type!r}, only {MODEL_TYPE!r} is supported"
        )
    denoising = Reader(f"{source}: denoising_config", text.get("denoising_config", as_object, {}))
    quantization = Reader(
        f"{source}: quantization_config", text.get("quantization_config", as_object, {})
    )
    rope = _rope(text, source)
    _refuse_unsupported(text, rope, denoising)
    num_hidden_layers = text.get("num_hidden_layers", as_layer_count)
    config = ModelConfig(
        vocab_size=text.get("vocab_size", as_size),
        hidden_size=text.get("hidden_size", as_size),
        num_hidden_layers=num_hidden_layers,
        layer_types=_layer_types(text, num_hidden_layers),
        num_attention_heads=text.get("num_attention_heads", as_size),
        num_key_value_heads=text.get("num_key_value_heads", as_size),
        head_dim=text.get("head_dim", as_size),
        rope_theta=rope.get("rope_theta", as_number),
        partial_rotary_factor=rope.get("partial_rotary_factor", as_number),
        linear_num_key_heads=text.get("linear_num_key_heads", as_size),
        linear_num_value_heads=text.get("linear_num_value_heads", as_size),
        linear_key_head_dim=text.get("linear_key_head_dim", as_size),
        linear_value_head_dim=text.get("linear_value_head_dim", as_size),
        linear_conv_kernel_dim=text.get("linear_conv_kernel_dim", as_size),
        num_experts=text.get("num_experts", as_size),
        num_experts_per_tok=text.get("num_experts_per_tok", as_size),
        moe_intermediate_size=text.get("moe_intermediate_size", as_size),
        shared_expert_intermediate_size=text.get("shared_expert_intermediate_size", as_size),
        rms_norm_eps=text.get("rms_norm_eps", as_number),
        tie_word_embeddings=text.get("tie_word_embeddings", as_flag, False),
        max_position_embeddings=text.get("max_position_embeddings", as_context),
        block_size=text.get("block_size", as_size),
        mask_token_id=text.get("mask_token_id", as_token_id),
        threshold=denoising.get("threshold", as_number, 0.95),
        coreset_enabled=text.get("moe_block_coreset_enabled", as_flag, False),
        coreset_top_p=text.get("moe_block_coreset_top_p", as_number, 1.0),
        eos_token_id=text.get("eos_token_id", as_token_ids, ()),
        pad_token_id=text.get("pad_token_id", as_token_id, None),
        stop_token_ids=text.get("stop_token_ids", as_token_ids, ()),
        dtype=text.get("dtype", as_text, text.get("torch_dtype", as_text, "bfloat16")),
        quant_method=quantization.get("quant_method", as_text, None),
        quant_format=quantization.get("format", as_text, None),
        unknown_keys=_unknown_keys(text, rope, denoising),
    )
    _check_sizes(config, source)
    return config


def _rope(text: Reader, source: str) -> Reader:
    """Rotary settings: `rope_parameters`, or in older files top level and `rope_scaling`."""
    older = {key: text.values[key] for key in _ROPE_KEYS if key in text.values}
    scaling: dict[str, Any] = text.get("rope_scaling", as_object, {})
    rope: dict[str, Any] = text.get("rope_parameters", as_object, {})
    return Reader(f"{source}: rope_parameters", {**older, **scaling, **rope})


def _unknown_keys(text: Reader, rope: Reader, denoising: Reader) -> tuple[str, ...]:
    names = {key for key in text.values if not _INERT_KEYS.fullmatch(key)}
    names -= text.read | set(_ROPE_KEYS)
    names |= {f"rope_parameters.{key}" for key in set(rope.values) - rope.read}
    names |= {f"denoising_config.{key}" for key in set(denoising.values) - denoising.read}
    return tuple(sorted(names))


def _layer_types(text: Reader, num_hidden_layers: int) -> tuple[str, ...]:
    interval = text.get("full_attention_interval", as_size, 4)
    default = tuple(
        LINEAR_ATTENTION if (layer + 1) % interval else FULL_ATTENTION
        for layer in range(num_hidden_layers)
    )
    layer_types = text.get("layer_types", as_texts, default)
    kinds = {FULL_ATTENTION, LINEAR_ATTENTION}
    if len(layer_types) != num_hidden_layers or not kinds.issuperset(layer_types):
        raise ConfigError(
            f"{text.source}: layer_types has {len(layer_types)} of {sorted(set(layer_types))}, "
            f"expected {num_hidden_layers} (num_hidden_layers) of {sorted(kinds)}"
        )
    return layer_types


def _refuse_unsupported(text: Reader, rope: Reader, denoising: Reader) -> None:
    """Settings that would silently compute something else are refused by name."""
    required: list[tuple[Reader, str, object, Callable[[Any], object]]] = [
        (text, "norm_topk_prob", True, as_flag),
        (text, "attn_output_gate", True, as_flag),
        (text, "hidden_act", "silu", as_text),
        (text, "num_shared_experts", 1, as_integer),
        (text, "linear_conv_kernel_dim", 4, as_integer),
        (rope, "rope_type", "default", as_text),
        (rope, "type", "default", as_text),
        (denoising, "algorithm", "low_confidence", as_text),
    ]
    for reader, key, wanted, convert in required:
        value = reader.get(key, convert, wanted)
        if value != wanted:
            raise ConfigError(f"{reader.source}: {key} is {value!r}, only {wanted!r} is supported")


def _check_sizes(config: ModelConfig, source: str) -> None:
    """Relations between sizes that the operators rely on."""
    c = config
    for many, few in (
        ("num_attention_heads", "num_key_value_heads"),
        ("linear_num_value_heads", "linear_num_key_heads"),
    ):
        heads, per = getattr(c, many), getattr(c, few)
        if heads % per:
            raise ConfigError(f"{source}: {many} {heads} is no multiple of {few} {per}")
    rotary = "partial_rotary_factor x head_dim"
    ranges = [
        ("num_experts", c.num_experts, 1, MOST_EXPERTS),
        ("num_experts_per_tok", c.num_experts_per_tok, 1, c.num_experts),
        ("block_size", c.block_size, 1, MOST_BLOCK_ROWS),
        (rotary, c.rotary_dim, 2, c.head_dim),
        ("moe_block_coreset_top_p", c.coreset_top_p, 1e-300, 1),
        ("denoising_config: threshold", c.threshold, 0, 1),
        ("rms_norm_eps", c.rms_norm_eps, 1e-300, 1),
        ("rope_theta", c.rope_theta, 1e-300, 1e300),
    ]
    for key, value, low, high in ranges:
        if not low <= value <= high:
            raise ConfigError(f"{source}: {key} is {value}, expected {low} to {high}")
    if c.rotary_dim % 2:
        raise ConfigError(f"{source}: {rotary} is {c.rotary_dim}, expected even")
    keys = "mask_token_id eos_token_id stop_token_ids pad_token_id"
    _check_ids(config, keys, c.vocab_size, source)


def _check_ids(
    config: ModelConfig | GenerationConfig, keys: str, vocab_size: int, source: str
) -> None:
    for key in keys.split():
        value = getattr(config, key)
        for token in value if isinstance(value, tuple) else (value or 0,):
            if token >= vocab_size:
                raise ConfigError(f"{source}: {key} {token} is outside vocab_size {vocab_size}")


def read_generation_config(folder: Path, config: ModelConfig) -> GenerationConfig:
    """The response controls, from `generation_config.json` where there is one.

    Stop ids that it lacks come from `config`; a checkpoint without any stop id is legal.

    Raises:
        ConfigError: unreadable file or a wrongly typed key.
    """
    path = folder / "generation_config.json"
    values = read_json_object(path) if os.path.lexists(path) else {}
    return parse_generation_config(values, config, str(path))


def parse_generation_config(
    values: Mapping[str, Any], config: ModelConfig, source: str
) -> GenerationConfig:
    """As `read_generation_config`, for an object that is read already."""
    reader = Reader(source, values)
    generation = GenerationConfig(
        eos_token_id=reader.get("eos_token_id", as_token_ids, config.eos_token_id),
        stop_token_ids=reader.get("stop_token_ids", as_token_ids, config.stop_token_ids),
        pad_token_id=reader.get("pad_token_id", as_token_id, config.pad_token_id),
        suppress_tokens=reader.get("suppress_tokens", as_token_ids, ()),
        presence_penalty=reader.get("presence_penalty", as_strength, 0.0),
        frequency_penalty=reader.get("frequency_penalty", as_strength, 0.0),
        repetition_penalty=reader.get("repetition_penalty", as_factor, 1.0),
        dllm_length_penalty=reader.get("dllm_length_penalty", as_strength, 0.0),
        dllm_length_penalty_start=reader.get("dllm_length_penalty_start", as_integer, 8192),
        dllm_length_penalty_window=reader.get("dllm_length_penalty_window", as_size, 8192),
        dllm_think_end_bias=reader.get("dllm_think_end_bias", as_strength, 0.0),
        dllm_think_end_start=reader.get("dllm_think_end_start", as_integer, 4096),
        dllm_think_end_window=reader.get("dllm_think_end_window", as_size, 4096),
        dllm_think_end_token_id=reader.get("dllm_think_end_token_id", as_token_id, None),
        given=frozenset(key for key, value in values.items() if value is not None),
    )
    keys = "eos_token_id stop_token_ids suppress_tokens pad_token_id dllm_think_end_token_id"
    _check_ids(generation, keys, config.vocab_size, source)
    return generation
