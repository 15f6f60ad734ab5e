"""The tensors of the real model, and the type of each in every kind of file, against a table.

The table is written out here from llama.cpp's `qwen35moe.cpp` and `llama-quant.cpp`, and from sizes
that llama-quantize's files have.
"""

from collections import Counter
from dataclasses import replace

import pytest

from clover_local.config import ModelConfig
from clover_local.errors import SettingsError
from clover_local.gguf.export.mixtures import mixture, tensor_type
from clover_local.gguf.tensors import named_entries
from clover_local.gguf.types import TYPES

EVERY = {
    "attn_norm.weight": (2048,),
    "post_attention_norm.weight": (2048,),
    "ffn_gate_inp.weight": (256, 2048),
    "ffn_gate_exps.weight": (256, 512, 2048),
    "ffn_up_exps.weight": (256, 512, 2048),
    "ffn_down_exps.weight": (256, 2048, 512),
    "ffn_gate_inp_shexp.weight": (2048,),
    "ffn_gate_shexp.weight": (512, 2048),
    "ffn_up_shexp.weight": (512, 2048),
    "ffn_down_shexp.weight": (2048, 512),
}
GDN = {
    "attn_qkv.weight": (8192, 2048),
    "attn_gate.weight": (4096, 2048),
    "ssm_alpha.weight": (32, 2048),
    "ssm_beta.weight": (32, 2048),
    "ssm_conv1d.weight": (8192, 4),
    "ssm_a": (32,),
    "ssm_dt.bias": (32,),
    "ssm_norm.weight": (128,),
    "ssm_out.weight": (2048, 4096),
}
ATTENTION = {
    "attn_q.weight": (8192, 2048),
    "attn_k.weight": (512, 2048),
    "attn_v.weight": (512, 2048),
    "attn_output.weight": (2048, 4096),
    "attn_q_norm.weight": (256,),
    "attn_k_norm.weight": (256,),
}
OUTER = {
    "token_embd.weight": (248320, 2048),
    "output_norm.weight": (2048,),
    "output.weight": (248320, 2048),
}
FLOAT32 = {
    "attn_norm.weight",
    "post_attention_norm.weight",
    "ffn_gate_inp.weight",
    "ffn_gate_inp_shexp.weight",
    "ssm_conv1d.weight",
    "ssm_a",
    "ssm_dt.bias",
    "ssm_norm.weight",
    "attn_q_norm.weight",
    "attn_k_norm.weight",
    "output_norm.weight",
}
MORE_BITS = {0, 1, 2, 3, 4, 7, 10, 13, 16, 19, 22, 25, 28, 31, 34, 35, 36, 37, 38, 39}
VALUES = ("attn_qkv.weight", "attn_v.weight")
DOWN = ("ffn_down_exps.weight", "ffn_down_shexp.weight")


def expected_shapes() -> dict[str, tuple[int, ...]]:
    shapes = {**OUTER}
    for layer in range(40):
        of_layer = {**EVERY, **(ATTENTION if layer % 4 == 3 else GDN)}
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in of_layer.items()}
    return shapes


def expected_type(file_type: str, name: str, *, imatrix: bool = False) -> str:
    """llama-quantize's choice for the real model."""
    _, layer_text, part = name.split(".", 2) if name.startswith("blk.") else ("", "0", name)
    layer, layers_with_more = int(layer_text), MORE_BITS
    if part in FLOAT32:
        return "F32"
    if file_type in ("F32", "F16", "BF16", "Q8_0", "Q6_K"):
        return file_type
    if name == "output.weight":
        return "Q6_K"
    if file_type in ("Q4_K_M", "Q5_K_M"):
        more = part in VALUES + DOWN and layer in layers_with_more
        return "Q6_K" if more else file_type[:4]
    if file_type == "Q3_K_M":
        if part in VALUES + DOWN:
            return "Q5_K" if layer < 2 else "Q4_K"
        return "Q4_K" if part == "attn_output.weight" else "Q3_K"
    if file_type == "IQ4_XS":
        if part in VALUES or (part in DOWN and layer < 5 and not imatrix):
            return "Q5_K"
        return "IQ4_XS"
    return "Q4_1" if imatrix and part in DOWN and layer < 5 else "Q4_0"


def actual_types(config: ModelConfig, file_type: str, *, imatrix: bool = False) -> dict[str, str]:
    mix = mixture(file_type, None, has_imatrix=imatrix)
    return {each.name: tensor_type(each, mix, config).name for each in named_entries(config)}


def mebibytes(config: ModelConfig, file_type: str | None, preset: str | None = None) -> float:
    mix = mixture(file_type, preset, has_imatrix=False)
    total = 0
    for each in named_entries(config):
        kind, rows = tensor_type(each, mix, config), 1
        for size in each.shape[:-1]:
            rows *= size
        total += rows * kind.row_bytes(each.shape[-1])
    return total / 2**20


def test_the_real_model_has_exactly_the_733_tensors_of_the_architecture(
    real_config: ModelConfig,
) -> None:
    shapes = {each.name: each.shape for each in named_entries(real_config)}
    assert len(shapes) == 733
    assert shapes == expected_shapes()


@pytest.mark.parametrize(
    "file_type",
    ["F16", "BF16", "Q8_0", "Q6_K", "Q5_K_M", "Q4_K_M", "Q4_0", "IQ4_XS", "Q3_K_M"],
)
@pytest.mark.parametrize("imatrix", [False, True], ids=["plain", "imatrix"])
def test_types_of_the_real_model_are_those_of_llama_quantize(
    file_type: str, imatrix: bool, real_config: ModelConfig
) -> None:
    types = actual_types(real_config, file_type, imatrix=imatrix)
    assert types == {name: expected_type(file_type, name, imatrix=imatrix) for name in types}
    assert Counter(types.values())["F32"] == 301


@pytest.mark.parametrize(
    ("file_type", "size"),
    [("Q8_0", 35183), ("Q6_K", 27183), ("Q4_K_M", 20176), ("IQ4_XS", 18051), ("Q3_K_M", 15978)],
)
def test_sizes_of_the_real_model_are_the_known_ones(
    file_type: str, size: int, real_config: ModelConfig
) -> None:
    assert abs(mebibytes(real_config, file_type) - size) < 0.6


def test_the_preset_keeps_attention_delta_net_and_shared_expert_at_q8_0(
    real_config: ModelConfig,
) -> None:
    mix = mixture(None, "clover-q4", has_imatrix=False)
    for each in named_entries(real_config):
        kind = tensor_type(each, mix, real_config).name
        part = each.name.split(".", 2)[-1]
        usual = expected_type("Q4_K_M", each.name)
        kept = part.startswith(("attn_", "ssm_")) or "_shexp" in part
        assert kind == ("Q8_0" if kept and usual != "F32" else usual)
    more = mebibytes(real_config, None, "clover-q4") - mebibytes(real_config, "Q4_K_M")
    assert round(more) == 607


def test_rows_that_are_no_multiple_of_256_get_the_next_type_of_blocks_of_32(
    golden_config: ModelConfig,
) -> None:
    config = replace(golden_config, num_experts=9)
    for file_type, fallback in (("Q4_K_M", "Q5_0"), ("IQ4_XS", "IQ4_NL"), ("Q3_K_M", "Q4_0")):
        types = actual_types(config, file_type)
        assert types["token_embd.weight"] == fallback
        assert types["output.weight"] == "Q8_0"
        assert types["blk.0.ffn_gate_exps.weight"] == fallback
    assert actual_types(config, "Q3_K_M")["blk.0.attn_qkv.weight"] == "Q5_1"
    assert actual_types(config, "Q4_K_M")["blk.3.attn_v.weight"] == "Q8_0"  # Q6_K's


def test_rows_that_are_no_multiple_of_32_become_f16(golden_config: ModelConfig) -> None:
    config = replace(golden_config, hidden_size=40, num_experts=9)
    types = actual_types(config, "Q4_0")
    assert types["token_embd.weight"] == types["blk.0.ffn_up_exps.weight"] == "F16"
    assert types["blk.0.ffn_down_exps.weight"] == "Q4_0"
    assert types["output.weight"] == "F16"


def test_eight_experts_are_taken_for_mixtral_as_llama_quantize_takes_them(
    golden_config: ModelConfig,
) -> None:
    types = actual_types(replace(golden_config, hidden_size=256, head_dim=64), "Q4_K_M")
    assert types["blk.3.attn_k.weight"] == types["blk.3.attn_v.weight"] == "Q8_0"
    assert types["blk.0.attn_qkv.weight"] == "Q8_0"
    assert types["blk.3.attn_output.weight"] == "Q5_K"
    assert types["blk.3.attn_q.weight"] == "Q4_K"


def test_tied_embeddings_have_no_output_and_the_outputs_type(real_config: ModelConfig) -> None:
    types = actual_types(replace(real_config, tie_word_embeddings=True), "Q4_K_M")
    assert "output.weight" not in types
    assert types["token_embd.weight"] == "Q6_K"


def test_wrong_names_say_what_there_is() -> None:
    with pytest.raises(SettingsError, match=r"--type Q9 is unknown: use one of F32, .*IQ4_XS"):
        mixture("Q9", None, has_imatrix=False)
    with pytest.raises(SettingsError, match="--preset x is unknown: use clover-q4"):
        mixture(None, "x", has_imatrix=False)
    with pytest.raises(SettingsError, match="leave --type Q8_0 out"):
        mixture("Q8_0", "clover-q4", has_imatrix=False)
    assert mixture("q4_k_m", None, has_imatrix=False).file_type == "Q4_K_M"


def test_block_sizes_are_those_of_ggml() -> None:
    gguf = pytest.importorskip("gguf")
    for kind in TYPES.values():
        theirs = gguf.GGMLQuantizationType(kind.number)
        assert theirs.name == kind.name
        assert gguf.GGML_QUANT_SIZES[theirs] == (kind.block, kind.nbytes)
