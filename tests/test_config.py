"""config.json and generation_config.json: what is read, and how what is wrong is named."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from clover_local.config import (
    FULL_ATTENTION,
    LINEAR_ATTENTION,
    GenerationConfig,
    ModelConfig,
    parse_generation_config,
    parse_model_config,
    read_generation_config,
    read_model_config,
)
from clover_local.errors import ConfigError
from clover_local.files import read_json_object

OPTIONAL = {
    "architectures",
    "layer_types",
    "full_attention_interval",
    "num_shared_experts",
    "rope_parameters",  # reported by the keys in it
    "hidden_act",
    "attn_output_gate",
    "tie_word_embeddings",
    "norm_topk_prob",
    "denoising_config",
    "moe_block_coreset_enabled",
    "moe_block_coreset_top_p",
    "eos_token_id",
    "pad_token_id",
    "torch_dtype",
    "dtype",
}


@pytest.fixture
def values(golden_folder: Path) -> dict[str, Any]:
    return read_json_object(golden_folder / "config.json")


def parse(values: dict[str, Any]) -> ModelConfig:
    return parse_model_config(values, "config.json")


def test_every_size_of_the_golden_config_is_read(golden_config: ModelConfig) -> None:
    c = golden_config
    assert (c.vocab_size, c.hidden_size, c.num_hidden_layers) == (512, 64, 4)
    assert c.layer_types == (*[LINEAR_ATTENTION] * 3, FULL_ATTENTION)
    assert [c.is_attention(layer) for layer in range(4)] == [False, False, False, True]
    assert (c.num_attention_heads, c.num_key_value_heads, c.head_dim) == (4, 2, 32)
    assert (c.rope_theta, c.partial_rotary_factor, c.rotary_dim) == (1e7, 0.25, 8)
    assert (c.linear_num_key_heads, c.linear_num_value_heads) == (2, 4)
    assert (c.linear_key_head_dim, c.linear_value_head_dim) == (32, 32)
    assert (c.linear_conv_kernel_dim, c.qkv_dim) == (4, 256)
    assert (c.num_experts, c.num_experts_per_tok) == (8, 2)
    assert (c.moe_intermediate_size, c.shared_expert_intermediate_size) == (32, 32)
    assert (c.rms_norm_eps, c.tie_word_embeddings) == (1e-6, False)
    assert (c.max_position_embeddings, c.block_size, c.mask_token_id) == (131072, 32, 510)
    assert (c.threshold, c.coreset_enabled, c.coreset_top_p) == (0.95, True, 0.8)
    assert (c.eos_token_id, c.pad_token_id, c.dtype) == ((507, 506), 506, "bfloat16")
    assert c.unknown_keys == ()


def test_a_nested_text_config_reads_as_the_flat_one(values: dict[str, Any]) -> None:
    top = {key: values.pop(key) for key in ("architectures", "model_type", "eos_token_id")}
    nested = {**top, "text_config": {**values, "model_type": "clover_moe_text"}}
    assert parse(nested) == parse({**top, **values})


def test_the_model_type_may_stand_in_the_text_config_alone(values: dict[str, Any]) -> None:
    assert parse({"text_config": values}) == parse(values)
    with pytest.raises(ConfigError, match="model_type is 'qwen3_5_moe'"):
        parse({"model_type": "qwen3_5_moe", "text_config": values})


def test_text_config_wins_over_the_top_level(values: dict[str, Any]) -> None:
    values["text_config"] = {"mask_token_id": 400}
    assert parse(values).mask_token_id == 400


def test_the_older_rope_spelling_reads_as_the_newer(values: dict[str, Any]) -> None:
    newer = parse(values)
    del values["rope_parameters"]
    assert parse({**values, "rope_theta": 10000000, "partial_rotary_factor": 0.25}) == newer


def test_layer_types_follow_from_the_interval(values: dict[str, Any]) -> None:
    del values["layer_types"]
    values |= {"num_hidden_layers": 5, "full_attention_interval": 2}
    kinds = parse(values).layer_types
    assert [kind == FULL_ATTENTION for kind in kinds] == [False, True, False, True, False]


def test_absent_optional_keys_have_the_defaults_of_the_release(values: dict[str, Any]) -> None:
    c = parse(
        {key: value for key, value in values.items() if key not in OPTIONAL - {"rope_parameters"}}
    )
    assert (c.threshold, c.coreset_enabled, c.coreset_top_p) == (0.95, False, 1.0)
    assert (c.eos_token_id, c.pad_token_id, c.tie_word_embeddings) == ((), None, False)
    assert c.layer_types == (*[LINEAR_ATTENTION] * 3, FULL_ATTENTION)


def test_a_missing_required_key_is_named(values: dict[str, Any]) -> None:
    required = sorted(values.keys() - OPTIONAL)
    assert len(required) == 20
    for key in required:
        with pytest.raises(ConfigError, match=f"config.json lacks the key '{key}'"):
            parse({name: value for name, value in values.items() if name != key})


@pytest.mark.parametrize("key", ["rope_theta", "partial_rotary_factor"])
def test_a_missing_rope_key_is_named(values: dict[str, Any], key: str) -> None:
    del values["rope_parameters"][key]
    with pytest.raises(ConfigError, match=f"rope_parameters lacks the key '{key}'"):
        parse(values)


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("vocab_size", "512", "an integer"),
        ("hidden_size", 64.0, "an integer"),
        ("num_experts", True, "an integer"),
        ("num_hidden_layers", 0, "a positive integer"),
        ("max_position_embeddings", 2**31 - 1, "a positive integer, at most 4194304"),
        ("block_size", -32, "a positive integer"),
        ("mask_token_id", -1, "a token id"),
        ("mask_token_id", [510], "an integer"),
        ("rms_norm_eps", "1e-6", "a number"),
        ("rms_norm_eps", float("nan"), "a finite number"),
        ("rms_norm_eps", float("-inf"), "a finite number"),
        ("rms_norm_eps", 10**400, "a finite number"),
        ("tie_word_embeddings", 1, "true or false"),
        ("layer_types", "linear_attention", "a list of strings"),
        ("layer_types", [1, 2, 3, 4], "a string"),
        ("eos_token_id", [507, "<|im_end|>"], "a token id or a list of token ids"),
        ("denoising_config", [], "an object"),
        ("rope_parameters", 3, "an object"),
        ("text_config", "no", "an object"),
        ("model_type", 7, "a string"),
    ],
)
def test_a_value_of_the_wrong_type_is_named_with_what_is_expected(
    values: dict[str, Any], key: str, value: object, expected: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        parse({**values, key: value})
    assert f"{key!r} is " in str(caught.value)
    assert f"expected {expected}" in str(caught.value)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"model_type": "qwen3_5_moe"}, "model_type is 'qwen3_5_moe', only 'clover_moe'"),
        ({"norm_topk_prob": False}, "norm_topk_prob is False"),
        ({"attn_output_gate": False}, "attn_output_gate is False"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"num_shared_experts": 2}, "num_shared_experts is 2"),
        ({"linear_conv_kernel_dim": 3}, "linear_conv_kernel_dim is 3"),
        ({"rope_scaling": {"type": "yarn", "factor": 4}}, "type is 'yarn'"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_type is 'yarn'"),
        ({"denoising_config": {"algorithm": "entropy"}}, "algorithm is 'entropy'"),
        ({"denoising_config": {"threshold": 95}}, "threshold is 95.0, expected 0 to 1"),
        ({"moe_block_coreset_top_p": 0}, "moe_block_coreset_top_p is 0.0"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok is 9, expected 1 to 8"),
        ({"num_key_value_heads": 3}, "num_attention_heads 4 is no multiple"),
        ({"linear_num_key_heads": 3}, "linear_num_value_heads 4 is no multiple"),
        ({"head_dim": 20}, "partial_rotary_factor x head_dim is 5, expected even"),
        ({"head_dim": 4}, "partial_rotary_factor x head_dim is 1, expected 2 to 4"),
        ({"num_hidden_layers": 5}, "expected 5 (num_hidden_layers)"),
        ({"layer_types": ["full_attention"] * 3 + ["mamba"]}, "'mamba'"),
        ({"mask_token_id": 512}, "mask_token_id 512 is outside vocab_size 512"),
        ({"eos_token_id": [1, 513]}, "eos_token_id 513 is outside"),
        ({"pad_token_id": 600}, "pad_token_id 600 is outside"),
        ({"stop_token_ids": 512}, "stop_token_ids 512 is outside"),
        ({"rms_norm_eps": 0}, "rms_norm_eps is 0.0"),
    ],
)
def test_what_this_runtime_would_compute_wrongly_is_refused_by_name(
    values: dict[str, Any], changes: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        parse({**values, **changes})
    assert complaint in str(caught.value)


def test_unknown_keys_are_kept_by_name_also_nested_ones(values: dict[str, Any]) -> None:
    values |= {"vision_config": {}, "zeta": 1}
    values["denoising_config"]["steps"] = 8
    values["rope_parameters"]["mrope_section"] = [11, 11, 10]
    assert parse(values).unknown_keys == (
        "denoising_config.steps",
        "rope_parameters.mrope_section",
        "vision_config",
        "zeta",
    )


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "is not valid JSON"),
        (b"{", "is not valid JSON"),
        (b'{"a": "\xff"}', "is not valid JSON"),
        (b"9" * 5000, "is not valid JSON"),
        (b"[" * 100_000, "is not valid JSON"),
        (b"[1]", "holds no JSON object"),
    ],
    ids=["empty", "cut", "not-utf8", "endless-number", "endless-depth", "list"],
)
def test_a_file_that_is_no_json_object_is_named(
    tmp_path: Path, content: bytes, complaint: str
) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        read_model_config(tmp_path)
    assert str(caught.value).startswith(f"{tmp_path / 'config.json'} {complaint}")
    assert "\n" not in str(caught.value)


def test_a_folder_without_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no config\.json: pass"):
        read_model_config(tmp_path)


def test_a_folder_in_the_place_of_the_config_is_an_error_too(tmp_path: Path) -> None:
    (tmp_path / "config.json").mkdir()
    with pytest.raises(ConfigError, match="cannot be read"):
        read_model_config(tmp_path)


def test_generation_config_is_optional_and_falls_back_to_the_config(
    golden_config: ModelConfig, tmp_path: Path
) -> None:
    generation = read_generation_config(tmp_path, golden_config)
    assert generation == GenerationConfig(eos_token_id=(507, 506), pad_token_id=506)
    assert generation.stop_ids == (506, 507)
    assert generation.given == frozenset()


def test_stop_ids_of_the_config_hold_where_the_generation_config_has_none(
    values: dict[str, Any],
) -> None:
    config = parse({**values, "stop_token_ids": [400, 507]})
    assert config.unknown_keys == ()
    assert parse_generation_config({}, config, "the file").stop_ids == (400, 506, 507)
    given = {"eos_token_id": 9, "stop_token_ids": [], "pad_token_id": 8}
    assert parse_generation_config(given, config, "the file").stop_ids == (8, 9)


def test_generation_config_wins_over_the_config(golden_config: ModelConfig, tmp_path: Path) -> None:
    values = {
        "eos_token_id": 3,
        "pad_token_id": 9,
        "stop_token_ids": [8, 3],
        "suppress_tokens": None,
        "presence_penalty": 1,
        "repetition_penalty": 1.1,
        "dllm_length_penalty": -0.5,
        "dllm_length_penalty_window": 77,
        "dllm_think_end_token_id": 505,
        "temperature": 0.6,
    }
    (tmp_path / "generation_config.json").write_text(json.dumps(values), encoding="utf-8")
    generation = read_generation_config(tmp_path, golden_config)
    assert generation.stop_ids == (3, 8, 9)
    assert (generation.presence_penalty, generation.repetition_penalty) == (1.0, 1.1)
    assert (generation.dllm_length_penalty, generation.dllm_length_penalty_start) == (-0.5, 8192)
    assert (generation.dllm_length_penalty_window, generation.dllm_think_end_start) == (77, 4096)
    assert (generation.dllm_think_end_token_id, generation.suppress_tokens) == (505, ())
    assert generation.given == values.keys() - {"suppress_tokens"}


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({"presence_penalty": "high"}, "'presence_penalty' is 'high', expected a number"),
        ({"frequency_penalty": float("inf")}, "expected a finite number"),
        ({"repetition_penalty": 0}, "'repetition_penalty' is 0, expected a number from 1e-06"),
        ({"dllm_length_penalty": 1e39}, "expected a number from -1000000 to 1000000"),
        ({"dllm_think_end_start": -(10**400)}, "expected an integer of at most 2147483647"),
        ({"dllm_length_penalty_window": 0}, "expected a positive integer"),
        ({"dllm_length_penalty_start": 1.5}, "expected an integer"),
        ({"suppress_tokens": [1, 512]}, "suppress_tokens 512 is outside vocab_size 512"),
        ({"dllm_think_end_token_id": 900}, "dllm_think_end_token_id 900 is outside"),
        ({"stop_token_ids": {}}, "expected a token id or a list of token ids"),
    ],
)
def test_a_wrong_generation_config_is_refused(
    golden_config: ModelConfig, values: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_generation_config(values, golden_config, "generation_config.json")
    assert str(caught.value).startswith("generation_config.json: ")
    assert complaint in str(caught.value)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_hidden_layers": 10**12, "layer_types": None},
        {"vocab_size": 10**400},
        {"head_dim": 10**400},
        {"num_experts": 10**8},
        {"block_size": 10**8},
        {"max_position_embeddings": 10**400},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_a_size_beyond_any_model_is_refused_at_once(
    values: dict[str, Any], changes: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError, match=next(iter(changes))):
        parse({**values, **changes})


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("kind", ["pipe", "folder", "device", "dangling link"])
def test_what_is_no_file_is_refused_and_not_waited_for(
    model_folder: Path, golden_config: ModelConfig, name: str, kind: str
) -> None:
    path = model_folder / name
    path.unlink()
    make: dict[str, Callable[[], object]] = {
        "pipe": lambda: os.mkfifo(path),
        "folder": path.mkdir,
        "device": lambda: path.symlink_to("/dev/zero"),
        "dangling link": lambda: path.symlink_to("nothing"),
    }
    make[kind]()
    with pytest.raises(ConfigError, match=f"{name} cannot be read"):
        read_model_config(model_folder)
        read_generation_config(model_folder, golden_config)


@pytest.mark.parametrize("nested", [False, True], ids=["flat", "nested"])
def test_the_method_that_quantized_the_weights_is_read_by_name(
    values: dict[str, Any], nested: bool
) -> None:
    quantization = {"quant_method": "awq", "format": "gemm", "bits": 4}
    if nested:
        values = {"text_config": values}
    config = parse({**values, "model_type": "clover_moe", "quantization_config": quantization})
    assert (config.quant_method, config.quant_format) == ("awq", "gemm")
    assert config.unknown_keys == ()
    assert parse(values).quant_method is None


def test_a_method_that_is_no_name_is_an_error(values: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="'quant_method' is 4, expected a string"):
        parse(values | {"quantization_config": {"quant_method": 4}})


def test_an_unfinished_quantization_is_no_folder_without_config(tmp_path: Path) -> None:
    (tmp_path / ".quantize").mkdir()
    with pytest.raises(ConfigError, match="is unfinished: run the same `clover-local quantize`"):
        read_model_config(tmp_path)
