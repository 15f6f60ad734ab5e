"""Matching tensors with the config: every layout fits, every misfit is named."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from clover_local.checkpoint.parameters import count_parameters
from clover_local.checkpoint.placements import Checkpoint, open_checkpoint
from clover_local.config import ModelConfig
from clover_local.errors import CheckpointError

DIFFUSION = ("conv_right_weight", "logit_scale", "history_bias", "history_c")


@pytest.fixture
def change(
    model_folder: Path, golden_config: ModelConfig
) -> Callable[[Callable[[dict[str, Tensor]], object]], Checkpoint]:
    """Rewrites the golden weights after an edit, and opens them."""

    def apply(edit: Callable[[dict[str, Tensor]], object]) -> Checkpoint:
        path = model_folder / "model.safetensors"
        tensors = load_file(path)
        edit(tensors)
        save_file(tensors, path)
        return open_checkpoint(model_folder, golden_config)

    return apply


Change = Callable[[Callable[[dict[str, Tensor]], object]], Checkpoint]


def test_the_golden_checkpoint_fits(golden_folder: Path, golden_config: ModelConfig) -> None:
    checkpoint = open_checkpoint(golden_folder, golden_config)
    checkpoint.require_fit()
    assert (checkpoint.problems, checkpoint.notes) == ((), ())
    assert checkpoint.has_diffusion
    assert len(checkpoint.placements) == len(checkpoint.tensors) == 84


def test_missing_surplus_and_misshapen_tensors_are_reported_together_by_name(
    change: Change,
) -> None:
    def edit(tensors: dict[str, Tensor]) -> None:
        del tensors["model.norm.weight"]
        tensors["model.layers.4.mlp.gate.weight"] = torch.zeros(8, 64)
        tensors["model.layers.3.self_attn.q_proj.bias"] = torch.zeros(256)
        tensors["lm_head.weight"] = torch.zeros(511, 64)

    with pytest.raises(CheckpointError) as caught:
        change(edit).require_fit()
    message = str(caught.value)
    assert "1 missing (model.norm.weight)" in message
    assert (
        "2 surplus (model.layers.3.self_attn.q_proj.bias, model.layers.4.mlp.gate.weight)"
        in message
    )
    assert "1 misshapen (lm_head.weight is [511, 64], expected [512, 64])" in message
    assert "\n" not in message


def test_a_long_list_of_misfits_is_abbreviated_with_a_count(
    golden_folder: Path, golden_config: ModelConfig
) -> None:
    wider = replace(golden_config, hidden_size=65)
    (problem,) = open_checkpoint(golden_folder, wider).problems
    assert problem.startswith("58 misshapen (")
    assert problem.endswith(" and 54 more)")


def test_an_integer_tensor_where_floats_belong_is_named(change: Change) -> None:
    name = "model.layers.1.linear_attn.in_proj_z.weight"
    checkpoint = change(lambda t: t.update({name: t[name].to(torch.int32)}))
    assert checkpoint.problems == (f"1 misshapen ({name} is I32, expected BF16 or F16 or F32)",)


@pytest.mark.parametrize("family", ["mtp.", "visual.", "model.visual."])
def test_known_foreign_families_are_skipped_with_a_note(change: Change, family: str) -> None:
    checkpoint = change(lambda t: t.update({f"{family}blocks.0.weight": torch.zeros(2, 3)}))
    assert checkpoint.problems == ()
    assert checkpoint.notes == (f"skipped 1 tensors of other parts ({family}blocks.0.weight)",)
    assert len(checkpoint.placements) == 84


def test_without_the_four_diffusion_families_the_file_is_causal_only(change: Change) -> None:
    def edit(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if name.endswith(DIFFUSION)]:
            del tensors[name]

    checkpoint = change(edit)
    assert checkpoint.problems == ()
    assert not checkpoint.has_diffusion
    assert checkpoint.notes == ("no diffusion parameters in these weights: only the mode ar works",)


@pytest.mark.parametrize("family", DIFFUSION)
def test_one_diffusion_family_without_the_others_is_refused(change: Change, family: str) -> None:
    def edit(tensors: dict[str, Tensor]) -> None:
        for name in [n for n in tensors if n.endswith(DIFFUSION) and not n.endswith(family)]:
            del tensors[name]

    checkpoint = change(edit)
    assert checkpoint.has_diffusion
    (problem,) = checkpoint.problems
    assert problem.startswith("9 missing (")


def test_a_diffusion_tensor_of_one_layer_alone_may_not_be_absent(change: Change) -> None:
    name = "model.layers.2.linear_attn.bd_softmax_history_c"
    assert change(lambda t: t.pop(name)).problems == (f"1 missing ({name})",)


def test_the_head_may_only_be_absent_when_it_is_tied(
    change: Change, model_folder: Path, golden_config: ModelConfig
) -> None:
    checkpoint = change(lambda tensors: tensors.pop("lm_head.weight"))
    assert checkpoint.problems == ("1 missing (lm_head.weight)",)
    tied = replace(golden_config, tie_word_embeddings=True)
    assert open_checkpoint(model_folder, tied).problems == ()


def test_fused_and_single_experts_in_one_file_are_refused(change: Change) -> None:
    def edit(tensors: dict[str, Tensor]) -> None:
        for expert in range(8):
            experts = f"model.layers.0.mlp.experts.{expert}."
            tensors[f"{experts}gate_proj.weight"] = torch.zeros(32, 64)
            tensors[f"{experts}up_proj.weight"] = torch.zeros(32, 64)
            tensors[f"{experts}down_proj.weight"] = torch.zeros(64, 32)

    missing, surplus = change(edit).problems
    assert missing.startswith("72 missing (model.layers.1.mlp.experts.0.gate_proj.weight")
    assert surplus.startswith("8 surplus (model.layers.0.mlp.experts.down_proj")


def test_a_missing_expert_is_named(change: Change) -> None:
    def edit(tensors: dict[str, Tensor]) -> None:
        for layer in range(4):
            experts = f"model.layers.{layer}.mlp.experts."
            gate_up = tensors.pop(f"{experts}gate_up_proj")
            down = tensors.pop(f"{experts}down_proj")
            for expert in range(8):
                gate, up = gate_up[expert].chunk(2)
                tensors[f"{experts}{expert}.gate_proj.weight"] = gate.clone()
                tensors[f"{experts}{expert}.up_proj.weight"] = up.clone()
                tensors[f"{experts}{expert}.down_proj.weight"] = down[expert].clone()
        del tensors["model.layers.2.mlp.experts.7.up_proj.weight"]

    checkpoint = change(edit)
    assert checkpoint.problems == ("1 missing (model.layers.2.mlp.experts.7.up_proj.weight)",)


def test_weights_of_another_model_are_all_named_not_crashed_on(
    golden_config: ModelConfig, tmp_path: Path
) -> None:
    save_file({"transformer.h.0.attn.weight": torch.zeros(2)}, tmp_path / "model.safetensors")
    missing, surplus = open_checkpoint(tmp_path, golden_config).problems
    assert missing.startswith("72 missing (model.embed_tokens.weight, ")
    assert surplus == "1 surplus (transformer.h.0.attn.weight)"


def test_the_count_is_that_of_the_tensors_in_the_file(
    golden_folder: Path, golden_config: ModelConfig
) -> None:
    total = sum(value.numel() for value in load_file(golden_folder / "model.safetensors").values())
    assert count_parameters(golden_config, diffusion=True).total == total


def test_tied_embeddings_are_counted_once_and_always_active(golden_config: ModelConfig) -> None:
    count = count_parameters(golden_config, diffusion=True)
    tied = count_parameters(replace(golden_config, tie_word_embeddings=True), diffusion=True)
    assert count.total - tied.total == 512 * 64
    assert count.active == tied.active


def test_the_real_model_has_the_published_number_of_parameters(real_config: ModelConfig) -> None:
    count = count_parameters(real_config, diffusion=True)
    causal = count_parameters(real_config, diffusion=False)
    assert round(count.total / 1e9, 2) == 34.66
    assert 2.8e9 < count.active < 3.2e9
    assert count.total - causal.total == 30 * (8192 * 3 + 3 * 32)


SaveShards = Callable[[Path, Sequence[Mapping[str, Tensor]]], None]


def test_placements_follow_the_bytes_on_disk_shard_by_shard(
    model_folder: Path, golden_config: ModelConfig, save_shards: SaveShards
) -> None:
    tensors = load_file(model_folder / "model.safetensors")
    names = sorted(tensors, reverse=True)
    save_shards(model_folder, [{name: tensors[name] for name in names[i::2]} for i in range(2)])
    placements = open_checkpoint(model_folder, golden_config).placements
    positions = [(p.tensor.shard.name, p.tensor.start) for p in placements]
    assert len(positions) == 84
    assert positions == sorted(positions)


Edit = Callable[[dict[str, Tensor]], object]
HEAD = "lm_head.weight"
ROUTER = "model.layers.0.mlp.gate.weight"
GATE = "model.layers.1.mlp.experts.3.gate_proj.weight"
Q_PROJ = "model.layers.3.self_attn.q_proj.weight"


def test_a_quantized_checkpoint_fits(quantized_folder: Path, golden_config: ModelConfig) -> None:
    checkpoint = open_checkpoint(quantized_folder, golden_config)
    assert (checkpoint.problems, checkpoint.notes, checkpoint.prefix) == ((), (), "model.")
    assert checkpoint.has_diffusion
    assert len(checkpoint.placements) == 84 + 4 * (8 * 3 - 2)
    positions = [(p.tensor.shard.name, p.tensor.start) for p in checkpoint.placements]
    assert positions == sorted(positions)


@pytest.mark.parametrize(
    ("edit", "complaint"),
    [
        (lambda t: t.pop(f"{HEAD}_scale"), f"1 misshapen ({HEAD}_packed lacks {HEAD}_scale)"),
        (
            lambda t: t.update({HEAD: torch.zeros(512, 64)}),
            f"1 misshapen ({HEAD} is there a second time as {HEAD}_packed)",
        ),
        (
            lambda t: t.update({f"{HEAD}_shape": torch.tensor([64, 512])}),
            f"1 misshapen ({HEAD}_shape says [64, 512], expected [512, 64])",
        ),
        (
            lambda t: t.update({f"{HEAD}_scale": torch.zeros(512, 5)}),
            f"1 misshapen ({HEAD}_scale is F32 [512, 5]: 64 columns are not 5 equal groups)",
        ),
        (
            lambda t: t.update({f"{Q_PROJ}_packed": torch.zeros(256, 16, dtype=torch.int64)}),
            f"1 misshapen ({Q_PROJ}_packed is I64 [256, 16], expected I32 [256, 8] (4 bits) "
            "or I32 [256, 16] (8 bits))",
        ),
        (
            lambda t: t.update({f"{GATE}_scale": t[f"{GATE}_scale"].float()}),
            "1 packed in another way than the other half of the expert's gate and up "
            "(model.layers.1.mlp.experts.3.up_proj.weight)",
        ),
        (
            lambda t: t.update({f"{Q_PROJ}_g_idx": torch.zeros(64, dtype=torch.int32)}),
            f"1 surplus ({Q_PROJ}_g_idx)",
        ),
        (
            lambda t: [t.pop(f"{Q_PROJ}_{part}") for part in ("packed", "scale", "shape")],
            f"1 missing ({Q_PROJ})",
        ),
    ],
    ids=["no-scale", "twice", "shape", "groups", "dtype", "halves", "surplus", "missing"],
)
def test_packed_misfits_are_named(
    quantized_copy: Path,
    golden_config: ModelConfig,
    rewrite: Callable[[Path, Edit], None],
    edit: Edit,
    complaint: str,
) -> None:
    rewrite(quantized_copy, edit)
    checkpoint = open_checkpoint(quantized_copy, golden_config)
    assert checkpoint.problems == (complaint,)
    with pytest.raises(CheckpointError, match="use the files of one and the same checkpoint"):
        checkpoint.require_fit()


def test_a_router_may_not_be_packed(
    quantized_copy: Path, golden_config: ModelConfig, rewrite: Callable[[Path, Edit], None]
) -> None:
    def edit(tensors: dict[str, Tensor]) -> None:
        del tensors[ROUTER]
        for part in ("packed", "scale", "shape"):
            tensors[f"{ROUTER}_{part}"] = tensors[f"{HEAD}_{part}"].clone()

    rewrite(quantized_copy, edit)
    missing, surplus = open_checkpoint(quantized_copy, golden_config).problems
    assert missing == f"1 missing ({ROUTER})"
    assert surplus == f"3 surplus ({ROUTER}_packed, {ROUTER}_scale, {ROUTER}_shape)"


def test_a_tied_head_that_is_packed_is_a_head_of_its_own(
    quantized_folder: Path, golden_config: ModelConfig
) -> None:
    tied = replace(golden_config, tie_word_embeddings=True)
    checkpoint = open_checkpoint(quantized_folder, tied)
    assert checkpoint.problems == ()
    assert (HEAD, None) in checkpoint.parts


@pytest.mark.parametrize(
    ("method", "layout", "complaint"),
    [
        (
            "gptq",
            None,
            "by gptq: import them with `clover-local quantize .* DESTINATION`",
        ),
        ("awq", "gemm", "quantized by awq: import them with"),
        ("fp8", None, "quantized by fp8: use the unquantized checkpoint, or one of compressed-"),
        ("bitsandbytes", None, "quantized by bitsandbytes: use the unquantized checkpoint"),
        (
            "compressed-tensors",
            "float-quantized",
            "compressed-tensors's format float-quantized: use the unquantized",
        ),
    ],
)
def test_weights_of_other_methods_are_refused_with_a_remedy(
    golden_folder: Path,
    golden_config: ModelConfig,
    method: str,
    layout: str | None,
    complaint: str,
) -> None:
    config = replace(golden_config, quant_method=method, quant_format=layout)
    with pytest.raises(CheckpointError, match=complaint):
        open_checkpoint(golden_folder, config)
