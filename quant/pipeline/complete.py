"""The last stage: index, config, tokenizer files, comparison with the source, report."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from clover_local.checkpoint.packed import PackedInfo
from clover_local.checkpoint.parameters import count_parameters
from clover_local.checkpoint.placements import Checkpoint, open_checkpoint
from clover_local.checkpoint.quantization import quantization_config
from clover_local.checkpoint.shards import read_shard
from clover_local.checkpoint.summary import SUMMARY_NAME, summarize
from clover_local.checkpoint.write import write_file, write_index, write_json
from clover_local.quant.documents import held_out_documents
from clover_local.quant.evaluation.evaluate import evaluate
from clover_local.quant.pipeline.description import config_json, copied
from clover_local.quant.pipeline.source import CONFIG_NAME, PlainSource, Source
from clover_local.quant.profiles import Recipe
from clover_local.quant.report import SizeReport
from clover_local.session import open_model

QUANTIZATION = "quantization_config"


def write_description(source: Source, shards: Sequence[Path], output: Path) -> Checkpoint:
    """Writes all that makes the shards in `output` a checkpoint, and opens it."""
    for name, content in copied(source).items():
        write_file(output / name, content)
    write_index(output, [read_shard(path) for path in shards])
    config = replace(source.config, quant_method=None, quant_format=None)  # those of the source
    checkpoint = open_checkpoint(output, config)
    values = config_json(source)
    values.pop(QUANTIZATION, None)
    quantization = quantization_config(checkpoint)
    if quantization is not None:
        values[QUANTIZATION] = quantization
    write_json(output / SUMMARY_NAME, summarize(checkpoint).to_json())
    write_json(output / CONFIG_NAME, values)
    return checkpoint


def size_report(checkpoint: Checkpoint, source: Source) -> SizeReport:
    """How large the result is."""
    packed = [
        (placement.tensor.nbytes, placement.target.shape)
        for placement in checkpoint.placements
        if isinstance(placement.tensor, PackedInfo) and placement.tensor.format.bits == 4
    ]
    numbers = sum(rows * columns for _, (rows, columns) in packed)
    int4_bytes = sum(nbytes for nbytes, _ in packed)
    count = count_parameters(source.config, diffusion=checkpoint.has_diffusion)
    return SizeReport(
        bytes=checkpoint.nbytes,
        source_bytes=source.nbytes,
        bits_per_weight=8 * checkpoint.nbytes / count.total,
        int4_bytes=int4_bytes,
        int4_ratio=int4_bytes / (2 * numbers) if numbers else None,
    )


def compare(
    output: Path,
    source: PlainSource,
    recipe: Recipe,
    *,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Any]:
    """The result beside its source on held-out text, as `evaluate --json` gives it.

    Names stand for what the models are, so that the place of the files changes no byte.
    """
    evaluation = evaluate(
        replace(open_model(str(output)), name="quantized"),
        against=replace(source.opened, name="source"),
        documents=held_out_documents(source.tokenizer),
        tokens=recipe.evaluation_tokens,
        seed=recipe.seed,
        device=recipe.device,
        on_progress=on_progress,
    )
    return evaluation.to_json()
