"""`clover-summary.json`: every number and byte once, and what a reader makes of it."""

import json
from pathlib import Path
from typing import Any

import pytest

from clover_local.checkpoint.parameters import count_parameters
from clover_local.checkpoint.placements import open_checkpoint
from clover_local.checkpoint.shards import INDEX_NAME
from clover_local.checkpoint.summary import SUMMARY_NAME, read_summary, summarize
from clover_local.config import ModelConfig
from clover_local.errors import ConfigError

EXPERT_NUMBERS = 3 * 32 * 64
RECORD = EXPERT_NUMBERS // 2 + EXPERT_NUMBERS // 32 * 2


def test_every_number_and_byte_is_counted_once(
    quantized_folder: Path, golden_config: ModelConfig
) -> None:
    checkpoint = open_checkpoint(quantized_folder, golden_config)
    summary = summarize(checkpoint)
    total = count_parameters(golden_config, diffusion=True).total
    assert sum(group.numbers for group in summary.groups) == total
    nbytes = sum(tensor.nbytes for tensor in checkpoint.tensors.values())
    assert sum(group.bytes for group in summary.groups) == nbytes
    assert summary.bits_per_weight == 8 * nbytes / total


def test_parts_say_their_formats(quantized_folder: Path, golden_config: ModelConfig) -> None:
    summary = summarize(open_checkpoint(quantized_folder, golden_config))
    (experts,) = summary.experts
    assert (experts.label, experts.numbers) == ("INT4 g32", 4 * 8 * EXPERT_NUMBERS)
    assert experts.bytes == 4 * 8 * (RECORD + 3 * 16)  # with three shapes
    assert [group.label for group in summary.trunk] == ["INT8 g32", "BF16"]
    assert [group.label for group in summary.head] == ["INT8 g32"]
    assert [group.label for group in summary.embedding] == ["BF16"]
    assert sum(group.numbers for group in summary.diffusion) == 3 * (3 * 256 + 3 * 4)
    assert [[(size.bytes, size.experts) for size in layer] for layer in summary.records] == [
        [(RECORD, 8)]
    ] * 4


def test_fused_experts_have_records_too(golden_folder: Path, golden_config: ModelConfig) -> None:
    summary = summarize(open_checkpoint(golden_folder, golden_config))
    assert [group.label for group in summary.experts] == ["BF16"]
    assert [[(size.bytes, size.experts) for size in layer] for layer in summary.records] == [
        [(2 * EXPERT_NUMBERS, 8)]
    ] * 4


def test_it_reads_back_what_was_written(quantized_folder: Path, golden_config: ModelConfig) -> None:
    summary = read_summary(quantized_folder)
    assert summary == summarize(open_checkpoint(quantized_folder, golden_config))


def test_a_summary_of_other_files_is_noticed(quantized_copy: Path) -> None:
    summary = read_summary(quantized_copy)
    assert summary is not None
    assert summary.describes(quantized_copy)
    with (quantized_copy / "model-00002-of-00005.safetensors").open("ab") as file:
        file.write(b"x")
    assert not summary.describes(quantized_copy)
    (quantized_copy / "model-00002-of-00005.safetensors").unlink()
    assert not summary.describes(quantized_copy)


def test_a_summary_beside_shards_without_their_index_describes_nothing(
    quantized_copy: Path,
) -> None:
    summary = read_summary(quantized_copy)
    (quantized_copy / INDEX_NAME).unlink()
    assert summary is not None
    assert not summary.describes(quantized_copy)


def test_a_folder_without_one_has_none(golden_folder: Path) -> None:
    assert read_summary(golden_folder) is None


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"clover_format_version": 2}, "clover_format_version 2, .* install a newer clover-local"),
        ({"clover_format_version": None}, "lacks the key 'clover_format_version'"),
        ({"experts": {}}, "'experts' is {}, expected a list of objects"),
        ({"experts": [{}]}, "experts lacks the key 'format'"),
        ({"records": [[{"bytes": -1, "experts": 2}]]}, "'bytes' is -1, expected an integer of 0"),
        ({"records": [3]}, r"'records' is \[3\], expected a list of objects"),
        ({"shards": [3]}, r"'shards' is \[3\], expected an object"),
    ],
)
def test_a_wrong_summary_is_refused_by_key(
    quantized_copy: Path, changes: dict[str, Any], complaint: str
) -> None:
    path = quantized_copy / SUMMARY_NAME
    values = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(values | changes), encoding="utf-8")
    with pytest.raises(ConfigError, match=complaint):
        read_summary(quantized_copy)
