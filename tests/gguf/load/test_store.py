"""Experts of a .gguf file as records in slots, and the memory planned for them."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from clover_local.checkpoint.read import read_experts
from clover_local.checkpoint.summary import summarize
from clover_local.decoding.settings import resolve
from clover_local.experts.record import weights_of
from clover_local.experts.store import ExpertStore
from clover_local.gguf.export.ggml import find_ggml
from clover_local.gguf.types import PACKED_FORMATS, TYPES
from clover_local.kernels.packed import PackedWeight, Weight
from clover_local.memory.model_bytes import from_summary
from clover_local.placement import MemoryOptions
from clover_local.session import load, open_model
from tests.gguf.conftest import ExportTo
from tests.gguf.load.conftest import Edited

PROMPT = [5, 77, 300, 41, 2, 9, 480]


def dense(weight: Weight) -> Tensor:
    return weight.dequantize() if isinstance(weight, PackedWeight) else weight.float()


def check_records(path: Path) -> None:
    """Every record is the expert that is read by parts, in the bytes that are planned."""
    opened = open_model(str(path))
    config = opened.config
    store = ExpertStore(opened.checkpoint, config, device="cpu", dtype=torch.float32)
    planned = from_summary(config, summarize(opened.checkpoint, device="cpu"), number_bytes=4)
    for layer in range(config.num_hidden_layers):
        expected = read_experts(opened.checkpoint, config, layer, range(config.num_experts))
        for expert, weights in enumerate(zip(*expected, strict=True)):
            layout = store.layouts(layer)[expert]
            record = torch.empty(layout.nbytes, dtype=torch.uint8)
            store.read(layer, expert, into=record)
            for got, wanted in zip(weights_of(record, layout), weights, strict=True):
                assert torch.equal(dense(got), dense(wanted))
            assert store.place_in_files(layer, expert)[1] > 0
        assert store.record_bytes[layer] == planned.slot_bytes[layer]


@pytest.mark.parametrize("file_type", ["F32", "BF16", "Q8_0", "Q4_0", "Q4_K_M", "Q6_K", "IQ4_XS"])
def test_records_are_the_experts_of_the_file(
    file_type: str, wide_folder: Path, export_to: ExportTo, tmp_path: Path
) -> None:
    if find_ggml() is None and file_type not in ("F32", "BF16", "Q8_0"):
        pytest.skip("libggml-python is not installed")
    check_records(export_to(str(wide_folder), tmp_path / "x.gguf", file_type=file_type))


def test_records_of_fused_and_of_unlike_matrices(
    golden_gguf: Path, golden_folder: Path, export_to: ExportTo, tmp_path: Path
) -> None:
    edited = Edited(golden_gguf)
    quantized = {
        kind: Edited(export_to(str(golden_folder), tmp_path / f"{kind}.gguf", file_type=kind))
        for kind in ("Q8_0", "Q4_0")
    }
    for half, kind in (("gate", "Q8_0"), ("up", "Q4_0")):
        name = f"blk.1.ffn_{half}_exps.weight"
        edited.tensors[name] = quantized[kind].tensors[name]
    names = [f"blk.2.ffn_{half}_exps.weight" for half in ("gate", "up")]
    gate, up = (quantized["Q8_0"].tensors[name][2] for name in names)
    each = len(gate) // 8
    both = b"".join(gate[i : i + each] + up[i : i + each] for i in range(0, 8 * each, each))
    edited.tensors["blk.2.ffn_gate_up_exps.weight"] = (TYPES["Q8_0"], (8, 64, 64), both)
    for name in names:
        del edited.tensors[name]
    check_records(edited.write(tmp_path / "x.gguf"))


def test_offloaded_experts_answer_as_resident_ones(
    golden_folder: Path, export_to: ExportTo, tmp_path: Path
) -> None:
    opened = open_model(str(export_to(str(golden_folder), tmp_path / "x.gguf", file_type="Q8_0")))
    settings = resolve(opened.config, opened.generation, {"max_new_tokens": 30}).settings

    def answer(memory: MemoryOptions) -> list[int]:
        session = load(opened, settings, context=150, device="cpu", memory=memory)
        list(session.generator.run(PROMPT))
        assert session.generator.result is not None
        return list(session.generator.result.token_ids)

    assert answer(MemoryOptions(expert_slots=12)) == answer(MemoryOptions())


@pytest.mark.parametrize("name", PACKED_FORMATS)
def test_on_a_gpu_no_group_is_smaller_than_its_kernels_take(name: str) -> None:
    from clover_local.checkpoint.packed import format_on

    layout = PACKED_FORMATS[name]
    assert format_on(layout, "cpu") == layout
    assert format_on(layout, "cuda").group_size == 32
    if layout.group_size == 32:
        assert format_on(layout, "cuda") == layout
