"""Names and head orders; `export/test_mixtures.py` has the whole table."""

from dataclasses import replace

import numpy as np
import torch

from clover_local.config import ModelConfig
from clover_local.gguf.tensors import Heads, named_entries


def test_every_parameter_but_the_diffusion_ones_is_in_exactly_one_tensor(
    golden_config: ModelConfig,
) -> None:
    from clover_local.checkpoint.parameters import targets

    wanted = {
        (target.name, target.first_row)
        for _, target in targets(golden_config, prefix="", per_expert=True)
        if not target.kind.diffusion
    }
    named = list(named_entries(golden_config))
    assert {each.parameter for each in named} == {name for name, _ in wanted}
    assert len({each.name for each in named}) == len(named)


def test_value_heads_go_from_grouped_to_tiled(golden_config: ModelConfig) -> None:
    config = replace(
        golden_config,
        linear_num_key_heads=3,
        linear_num_value_heads=6,
        linear_key_head_dim=5,
        linear_value_head_dim=4,
    )
    entries = {each.entry.name: each.entry for each in named_entries(config)}
    heads = entries["blk.{layer}.ssm_a"].order(config)
    assert heads is not None
    assert heads.tolist() == [0, 2, 4, 1, 3, 5]  # key heads 0 1 2, then their second value heads
    # As llama.cpp's converter does it, with torch.
    grouped = torch.arange(6 * 4).reshape(3, 2, 4).permute(1, 0, 2).flatten()
    for name in ("attn_gate.weight", "ssm_out.weight"):
        order = entries["blk.{layer}." + name].order(config)
        assert order is not None
        assert order.tolist() == grouped.tolist()
    behind = entries["blk.{layer}.attn_qkv.weight"].order(config)
    assert behind is not None
    assert behind.tolist() == [*range(30), *(30 + grouped).tolist()]
    assert entries["blk.{layer}.ssm_out.weight"].heads is Heads.COLUMNS


def test_as_many_value_heads_as_key_heads_stay(golden_config: ModelConfig) -> None:
    config = replace(golden_config, linear_num_key_heads=4)
    assert all(each.entry.order(config) is None for each in named_entries(config))


def test_orders_are_permutations(odd_config: ModelConfig) -> None:
    for each in named_entries(odd_config):
        order = each.entry.order(odd_config)
        if order is not None:
            axis = 1 if each.entry.heads is Heads.COLUMNS else 0
            assert np.array_equal(np.sort(order), np.arange(each.shape[axis]))
