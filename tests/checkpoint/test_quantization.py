"""`quantization_config`: what is packed how, in patterns that match those modules and no others."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from clover_local.checkpoint.packed import PackedInfo
from clover_local.checkpoint.placements import Checkpoint, Placement, open_checkpoint
from clover_local.checkpoint.quantization import quantization_config
from clover_local.config import ModelConfig, read_model_config


def matches(module: str, pattern: str) -> bool:
    """As compressed-tensors matches a module's name."""
    if pattern.startswith("re:"):
        return re.match(pattern.removeprefix("re:"), module) is not None
    return module == pattern


def assert_every_matrix_is_in_its_group(checkpoint: Checkpoint, config: dict[str, Any]) -> None:
    for placement in checkpoint.placements:
        module = placement.tensor.name.removesuffix(".weight")
        groups = [
            group["weights"]
            for group in config["config_groups"].values()
            for pattern in group["targets"]
            if matches(module, pattern)
        ]
        ignored = any(matches(module, pattern) for pattern in config["ignore"])
        if isinstance(placement.tensor, PackedInfo):
            layout = placement.tensor.format
            (weights,) = groups
            assert weights["num_bits"] == layout.bits
            assert weights["group_size"] == layout.group_size
            assert weights["symmetric"] == layout.symmetric
            assert not ignored
        else:
            assert not groups
            if len(placement.target.shape) == 2:
                assert ignored != placement.target.kind.convolution, module


@pytest.fixture(scope="session")
def checkpoint(quantized_folder: Path, golden_config: ModelConfig) -> Checkpoint:
    return open_checkpoint(quantized_folder, golden_config)


def test_experts_and_trunk_have_a_group_each(checkpoint: Checkpoint) -> None:
    config: Any = quantization_config(checkpoint)
    assert config["quant_method"] == "compressed-tensors"
    assert config["format"] == "pack-quantized"
    assert config["quantization_status"] == "compressed"
    experts, trunk = config["config_groups"].values()
    assert experts["targets"] == [
        rf"re:.*layers\.\d+\.mlp\.experts\.\d+\.{name}_proj$" for name in ("down", "gate", "up")
    ]
    assert experts["weights"] == {
        "num_bits": 4,
        "type": "int",
        "symmetric": True,
        "strategy": "group",
        "group_size": 32,
        "dynamic": False,
    }
    assert trunk["weights"]["num_bits"] == 8
    assert "re:.*lm_head$" in trunk["targets"]
    assert config["ignore"] == [
        r"re:.*embed_tokens$",
        r"re:.*layers\.\d+\.mlp\.gate$",
        r"re:.*layers\.\d+\.mlp\.shared_expert_gate$",
    ]
    assert_every_matrix_is_in_its_group(checkpoint, config)


def with_bits(placement: Placement, bits: int) -> Placement:
    assert isinstance(placement.tensor, PackedInfo)
    layout = replace(placement.tensor.format, bits=bits)
    return replace(placement, tensor=replace(placement.tensor, format=layout))


@pytest.mark.parametrize(
    ("chosen", "pattern"),
    [
        (r".*layers\.[13]\.mlp\.experts\.\d+\.down.*", r"layers\.(1|3)\.mlp\.experts\.\d+\.down"),
        (r".*layers\.2\.mlp\.experts\.[57]\.down.*", r"layers\.2\.mlp\.experts\.(5|7)\.down"),
    ],
    ids=["layers", "experts"],
)
def test_matrices_of_one_kind_may_differ_by_layer_and_by_expert(
    checkpoint: Checkpoint, chosen: str, pattern: str
) -> None:
    placements = tuple(
        with_bits(placement, 8) if re.fullmatch(chosen, placement.tensor.name) else placement
        for placement in checkpoint.placements
    )
    mixed = replace(checkpoint, placements=placements)
    config: Any = quantization_config(mixed)
    assert len(config["config_groups"]) == 3  # experts have groups of their own
    assert config["config_groups"]["group_1"]["targets"] == [f"re:.*{pattern}_proj$"]
    assert_every_matrix_is_in_its_group(mixed, config)


def test_a_trunk_of_the_experts_format_is_still_another_group(
    quantized_copy: Path,
    golden_config: ModelConfig,
    round_matrix: Callable[..., Any],
    rewrite: Callable[[Path, Callable[[dict[str, Tensor]], object]], None],
) -> None:
    packed = round_matrix(torch.randn(512, 64))
    rewrite(
        quantized_copy,
        lambda t: t.update(
            {"lm_head.weight_packed": packed.data, "lm_head.weight_scale": packed.scale}
        ),
    )
    checkpoint = open_checkpoint(quantized_copy, golden_config)
    config: Any = quantization_config(checkpoint)
    bits = [group["weights"]["num_bits"] for group in config["config_groups"].values()]
    assert bits == [4, 4, 8]
    assert config["config_groups"]["group_1"]["targets"] == ["re:.*lm_head$"]


def test_without_packed_matrices_there_is_no_config(
    golden_folder: Path, golden_config: ModelConfig
) -> None:
    assert quantization_config(open_checkpoint(golden_folder, golden_config)) is None


def test_the_config_reads_back_what_was_written(quantized_folder: Path) -> None:
    config = read_model_config(quantized_folder)
    assert (config.quant_method, config.quant_format) == ("compressed-tensors", "pack-quantized")
    assert config.unknown_keys == ()
