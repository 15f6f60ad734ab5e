"""Bytes of a model's parts, against the tensors that are really made."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from clover_local.checkpoint.load import load_parameters
from clover_local.checkpoint.placements import open_checkpoint
from clover_local.checkpoint.summary import Group, RecordSize, summarize
from clover_local.config import ModelConfig, read_model_config
from clover_local.kernels.gpu.experts import record
from clover_local.kernels.packed import PackedWeight
from clover_local.memory.model_bytes import (
    Formats,
    ModelBytes,
    StorageFormat,
    from_config,
    from_summary,
    record_bytes,
)

FORMATS = {
    "INT4-g128": StorageFormat(4, 128),
    "INT4-g32": StorageFormat(4, 32),
    "INT4-g32-asymmetric": StorageFormat(4, 32, symmetric=False),
    "INT8-g64-float32-scales": StorageFormat(8, 64, scale_bytes=4),
}


def in_torch(matrix: StorageFormat) -> record.MatrixFormat:
    assert matrix.group_size is not None
    scale = torch.float32 if matrix.scale_bytes == 4 else torch.bfloat16
    return record.MatrixFormat(matrix.bits, matrix.group_size, scale, not matrix.symmetric)


@pytest.mark.parametrize("down", FORMATS)
@pytest.mark.parametrize("gate_up", FORMATS)
@pytest.mark.parametrize("sizes", [(2048, 512), (256, 128), (384, 640)], ids=str)
def test_a_record_is_as_large_as_the_kernels_make_it(
    golden_config: ModelConfig, sizes: tuple[int, int], gate_up: str, down: str
) -> None:
    hidden, inner = sizes
    config = replace(golden_config, hidden_size=hidden, moe_intermediate_size=inner)
    one, other = FORMATS[gate_up], FORMATS[down]
    layout = record.record_layout(hidden, inner, gate_up=in_torch(one), down=in_torch(other))
    assert record_bytes(config, gate_up=one, down=other) == layout.nbytes


def test_the_real_model_has_the_bytes_of_the_specification(real_model: ModelBytes) -> None:
    assert real_model.slot_bytes == (1_622_016,) * 40
    assert real_model.experts == 10_240 * 1_622_016
    assert real_model.token == 20_480
    assert real_model.state == 62_914_560 + 2_949_120
    assert real_model.embedding == 248_320 * 2048 * 2
    assert real_model.head == 248_320 * 2048 * 66 // 64
    assert real_model.trunk == pytest.approx((1.283e9 + 0.126e9) * 66 / 64, rel=1e-3)
    assert real_model.small < 100e6


def counted(folder: Path, dtype: torch.dtype) -> dict[str, int]:
    """Bytes of the tensors that loading makes, by the part that they belong to."""
    config = read_model_config(folder)
    loaded = load_parameters(open_checkpoint(folder, config), config, dtype=dtype)
    parts = {"trunk": 0, "head": 0, "embedding": 0, "small": 0}
    for name, weight in loaded.parameters.items():
        part = {"embed_tokens.weight": "embedding", "lm_head.weight": "head"}.get(name)
        nbytes = weight.nbytes
        if part is None:
            small = not isinstance(weight, PackedWeight) and (
                (weight.dtype == torch.float32 and "proj" not in name) or "gate.weight" in name
            )
            part = "small" if small else "trunk"
            if part == "small" and isinstance(weight, torch.Tensor):
                nbytes = 4 * weight.numel()  # the shared expert's gate becomes float32
        parts[part] += nbytes
    return parts


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("packed", [False, True], ids=["plain", "packed"])
def test_parts_of_a_checkpoint_are_those_that_loading_makes(
    golden_folder: Path, quantized_folder: Path, packed: bool, dtype: torch.dtype
) -> None:
    folder = quantized_folder if packed else golden_folder
    config = read_model_config(folder)
    summary = summarize(open_checkpoint(folder, config))
    model = from_summary(config, summary, number_bytes=dtype.itemsize)
    found = {name: getattr(model, name) for name in ("trunk", "head", "embedding", "small")}
    assert found == counted(folder, dtype)


def test_records_of_a_checkpoint_are_aligned(
    quantized_folder: Path, golden_config: ModelConfig
) -> None:
    summary = summarize(open_checkpoint(quantized_folder, golden_config))
    assert summary.records[0] == (RecordSize(3456, 8),)
    one = StorageFormat(4, 32)
    expected = record_bytes(golden_config, gate_up=one, down=one)
    assert from_summary(golden_config, summary).slot_bytes == (expected,) * 4
    assert expected == 3 * 1024 + 3 * 256


def test_layers_with_two_sizes_of_experts_have_slots_for_the_larger(
    real_config: ModelConfig, quantized_folder: Path, golden_config: ModelConfig
) -> None:
    summary = summarize(open_checkpoint(quantized_folder, golden_config))
    four, eight = (
        Group(f"INT{bits}", 32, True, numbers=196608, bytes=196608 * bits // 8 + 196608 // 16)
        for bits in (4, 8)
    )
    narrow, wide = RecordSize(3456, 5), RecordSize(4480, 3)  # down INT4, down INT8
    mixed = replace(summary, experts=(four, eight), records=((wide, narrow), *[(narrow,)] * 3))
    model = from_summary(golden_config, mixed)
    assert model.slot_bytes == (4 * 1024 + 3 * 256 + 0, *[3 * 1024 + 3 * 256] * 3)
    assert model.layer_bytes[0] == 3 * 4864 + 5 * 3840


def test_a_mixture_that_the_summary_does_not_tell_is_rounded_up(
    quantized_folder: Path, golden_config: ModelConfig
) -> None:
    summary = summarize(open_checkpoint(quantized_folder, golden_config))
    odd = replace(summary, records=((RecordSize(3457, 8),),) * 4)
    assert from_summary(golden_config, odd).slot_bytes == (3584,) * 4


def test_a_summary_of_another_depth_is_refused(
    quantized_folder: Path, golden_config: ModelConfig
) -> None:
    summary = summarize(open_checkpoint(quantized_folder, golden_config))
    with pytest.raises(ValueError, match="records of 3 layers of 4"):
        from_summary(golden_config, replace(summary, records=summary.records[:3]))


def test_a_config_in_the_formats_of_a_checkpoint_gives_its_bytes(
    quantized_folder: Path, golden_config: ModelConfig
) -> None:
    summary = summarize(open_checkpoint(quantized_folder, golden_config))
    four, eight = StorageFormat(4, 32), (StorageFormat(8, 32),)
    assert from_config(golden_config, Formats(four, four, eight, eight)) == from_summary(
        golden_config, summary
    )


def test_matrices_that_no_group_divides_stay_plain(odd_config: ModelConfig, plain: Formats) -> None:
    unpacked = from_config(odd_config, plain)
    packed = from_config(odd_config, replace(plain, trunk=(StorageFormat(8, 64),)))
    assert packed.trunk == unpacked.trunk
    some = from_config(
        odd_config, replace(plain, trunk=(StorageFormat(8, 64), StorageFormat(8, 8)))
    )
    assert some.trunk < unpacked.trunk


def test_groups_that_do_not_divide_an_expert_are_refused(
    odd_config: ModelConfig, balanced: Formats
) -> None:
    with pytest.raises(ValueError, match="groups of 128 do not divide 40 columns"):
        from_config(odd_config, balanced)


def test_a_tied_head_is_the_embedding_and_lies_on_the_device(
    golden_config: ModelConfig, plain: Formats
) -> None:
    tied = from_config(replace(golden_config, tie_word_embeddings=True), plain)
    assert (tied.head, tied.embedding) == (512 * 64 * 2, 0)


def test_a_causal_model_has_no_diffusion_tensors(
    golden_config: ModelConfig, plain: Formats
) -> None:
    whole = from_config(golden_config, plain)
    causal = from_config(golden_config, plain, diffusion=False)
    assert whole.small - causal.small == 3 * 4 * (golden_config.qkv_dim * 3 + 3 * 4)


def test_planning_needs_no_torch() -> None:
    code = (
        "import sys, clover_local.memory.planner, clover_local.memory.predict\n"
        "import clover_local.memory.machine\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
