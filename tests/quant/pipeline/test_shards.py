"""The order of a shard's tensors, and halves of stacked matrices."""

import pytest
import torch

from clover_local.kernels.packed import PackedWeight, Weight, stack
from clover_local.quant.pipeline.layer import round_matrix
from clover_local.quant.pipeline.shards import halves, layer_tensors, outer_tensors


def packed(rows: int, columns: int, bits: int = 4) -> PackedWeight:
    return round_matrix(torch.randn(rows, columns), bits, group_size=32)[0]


def test_experts_come_first_as_records_and_shapes_last() -> None:
    experts = [(packed(12, 32), packed(32, 32)) for _ in range(2)]
    trunk: dict[str, Weight] = {
        "layers.3.self_attn.k_proj.weight": packed(8, 32, 8),
        "layers.3.input_layernorm.weight": torch.zeros(32),
        "layers.3.linear_attn.A_log": torch.zeros(4),
    }
    tensors = layer_tensors(3, trunk, experts=experts, prefix="model.")
    names = [tensor.name.removeprefix("model.layers.3.") for tensor in tensors]
    record = [
        "gate_proj.weight_packed",
        "up_proj.weight_packed",
        "gate_proj.weight_scale",
        "up_proj.weight_scale",
        "down_proj.weight_packed",
        "down_proj.weight_scale",
    ]
    assert names[:12] == [f"mlp.experts.{e}.{part}" for e in range(2) for part in record]
    assert names[12:16] == [
        "self_attn.k_proj.weight_packed",
        "self_attn.k_proj.weight_scale",
        "input_layernorm.weight",
        "linear_attn.A_log",
    ]
    assert all(name.endswith("weight_shape") for name in names[16:])
    assert len(names[16:]) == 2 * 3 + 1


@pytest.mark.parametrize("asymmetric", [False, True])
def test_halves_stack_back_to_the_whole(asymmetric: bool) -> None:
    weight = packed(12, 64)
    if asymmetric:
        weight = PackedWeight(weight.data, weight.scale, torch.randn(12, 2), 4, 32)
    gate, up = halves(weight)
    assert isinstance(gate, PackedWeight)
    assert isinstance(up, PackedWeight)
    assert torch.equal(gate.dequantize(), weight.dequantize()[:6])
    assert torch.equal(stack([gate, up]).dequantize(), weight.dequantize())


def test_halves_of_a_plain_matrix() -> None:
    weight = torch.randn(6, 4)
    gate, up = halves(weight)
    assert torch.equal(torch.cat([gate, up]), weight)  # type: ignore[list-item]


def test_tied_head_is_written_once() -> None:
    embedding, head = torch.zeros(5, 32), packed(5, 32, 8)
    outer = {"embed_tokens.weight": embedding, "norm.weight": torch.zeros(32)}
    tied = outer_tensors({**outer, "lm_head.weight": embedding}, prefix="model.")
    assert [tensor.name for tensor in tied] == ["model.embed_tokens.weight", "model.norm.weight"]
    apart = outer_tensors({**outer, "lm_head.weight": head}, prefix="model.")
    assert [tensor.name for tensor in apart[2:]] == [
        "lm_head.weight_packed",
        "lm_head.weight_scale",
        "lm_head.weight_shape",
    ]
