"""Quantizes a checkpoint: one decoder layer at a time, each finished one safe on disk.

A layer is finished once its shard, the rows behind it and, last, its report are written: that
report is its mark. A run that was stopped goes on behind the last mark. Nothing that is written
depends on when or how often a run was stopped: no times, no random state.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from clover_local.checkpoint.write import shard_name, write_file, write_json, write_shard
from clover_local.files import read_json_object
from clover_local.kernels.packed import Weight
from clover_local.quant.allocator import give_back_at_once
from clover_local.quant.calibration import LENGTH, CalibrationSequence, make_sequences
from clover_local.quant.documents import Document, read_documents
from clover_local.quant.memory import DEFAULT_LIMIT, check_import, disk_needed, plan_waves
from clover_local.quant.nf4 import nf4_round
from clover_local.quant.pipeline.complete import size_report, write_description
from clover_local.quant.pipeline.description import description_files
from clover_local.quant.pipeline.layer import Calibration
from clover_local.quant.pipeline.manifest import Manifest, arguments_of, hash_files
from clover_local.quant.pipeline.rows import RowFiles
from clover_local.quant.pipeline.shards import layer_tensors, outer_tensors
from clover_local.quant.pipeline.source import ForeignSource, GgufSource, PlainSource, Source
from clover_local.quant.pipeline.work import Importing, Quantizing, Work
from clover_local.quant.pipeline.work_folder import REPORT_NAME, WorkFolder, check_apart
from clover_local.quant.profiles import Recipe
from clover_local.quant.report import (
    LayerReport,
    QuantizationReport,
    parse_layer,
    parse_tensor,
)

OnStage = Callable[[str, int, int], None]
OnLayer = Callable[[LayerReport], None]
READING, QUANTIZING, COMPARING = "reading the source", "quantizing", "comparing with the source"
STEPS = 1000  # of progress, a layer


@dataclass(frozen=True)
class Outcome:
    """Where the result is, its report as JSON, and whether it was there before."""

    folder: Path
    report: dict[str, Any]
    was_finished: bool


@dataclass(frozen=True)
class Listener:
    """Who hears how a run goes on."""

    on_stage: OnStage = lambda stage, done, total: None
    """Called with the stage, what is done of it, and how much it is in all."""
    on_layer: OnLayer = lambda report: None
    """Called after each layer."""


def quantize(
    source: PlainSource,
    destination: Path,
    *,
    recipe: Recipe,
    calibration: Path | None = None,
    memory: int = DEFAULT_LIMIT,
    notes: Sequence[str] = (),
    listener: Listener = Listener(),
) -> Outcome:
    """Quantizes `source` into the folder `destination`, or continues where that stopped.

    Args:
        calibration: a text file; None takes the bundled texts.
        memory: bytes that the process may have resident at most; changes no byte of the result.
        notes: for the report.

    Raises:
        CloverError: something the user can mend: the destination, the disk, the source.
    """
    place = _place(source, destination)
    if recipe.method == "nf4":
        nf4_round(torch.zeros(1, 64))  # says what is missing before any work
    documents = read_documents(calibration, source.tokenizer)
    sequences = _sequences(source, documents, recipe)
    rows = max(sequence.rows for sequence in sequences)
    plan = plan_waves(source.config, recipe, limit=memory, rows=rows)
    if plan.is_tight:
        give_back_at_once()
    work = Quantizing(
        source, recipe, plan=plan, calibration=Calibration(sequences, recipe.preview_weight)
    )
    manifest = Manifest(
        source=hash_files(_files(source), _stage(listener, READING)),
        arguments=arguments_of(recipe),
        calibration=hashlib.sha256(repr(documents).encode()).hexdigest(),
    )
    needed = disk_needed(source.config, recipe, rows=sum(sequence.rows for sequence in sequences))
    return _carry_out(work, place, manifest, needed=needed, notes=notes, listener=listener)


def import_quantized(
    source: ForeignSource | GgufSource,
    destination: Path,
    *,
    memory: int = DEFAULT_LIMIT,
    listener: Listener = Listener(),
) -> Outcome:
    """As `quantize`, for weights that another program quantized: they are taken over exactly."""
    place = _place(source, destination)
    check_import(source.config, source.nbytes, limit=memory)
    give_back_at_once()  # there is little to compute that it could slow down
    manifest = Manifest(
        source=hash_files(_files(source), _stage(listener, READING)),
        arguments={"method": f"import of {source.method}"},
        calibration="",
    )
    return _carry_out(
        Importing(source), place, manifest, needed=source.nbytes, notes=(), listener=listener
    )


def _place(source: Source, destination: Path) -> WorkFolder:
    check_apart(source.folder, destination)
    place = WorkFolder(destination)
    place.check_foreign()
    return place


def _carry_out(
    work: Work,
    place: WorkFolder,
    manifest: Manifest,
    *,
    needed: int,
    notes: Sequence[str],
    listener: Listener,
) -> Outcome:
    report = place.destination / REPORT_NAME
    if place.is_finished(manifest):
        place.clear()
        return Outcome(place.destination, read_json_object(report), True)
    place.check_unfinished(manifest)
    with place.locked():
        if not place.is_finished(manifest):  # as it would be if another process was here until now
            place.check_unfinished(manifest)
            place.require_room(needed)
            _Job(work, place, manifest, notes=tuple(notes), listener=listener).run()
    return Outcome(place.destination, read_json_object(report), False)


class _Job:
    """One run over a locked work folder."""

    def __init__(
        self,
        work: Work,
        place: WorkFolder,
        manifest: Manifest,
        *,
        notes: tuple[str, ...],
        listener: Listener,
    ) -> None:
        self.work = work
        self.source = work.source
        self.place = place
        self.manifest = manifest
        self.notes = notes
        self.listener = listener
        self.layers = self.source.config.num_hidden_layers

    def run(self) -> None:
        """Does all that is not done yet."""
        if not self.place.manifest.exists():
            write_json(self.place.manifest, self.manifest.to_json())
        if not self.place.complete.exists():
            if not self._outer_mark.exists():
                self._store_outer()
            first = self._finished_layers()
            for layer in range(first, self.layers):
                self._store_layer(layer, first)
            self._complete()
        self.place.finish()

    def _store_outer(self) -> None:
        """Embedding and head, and the rows before the first layer."""
        outer, report = self.work.outer(self._rows(0))
        write_shard(self._shard(0), outer_tensors(outer, prefix=self.source.prefix))
        write_json(self._outer_mark, {"tensors": [asdict(report)]})

    def _store_layer(self, layer: int, first: int) -> None:
        """One decoder layer, and the rows behind it; the run began with layer `first`."""
        on_stage, total = self.listener.on_stage, STEPS * (self.layers - first)
        stored = self.work.layer(
            layer,
            rows=self._rows(layer),
            behind=self._rows(layer + 1) if layer + 1 < self.layers else None,
            on_progress=lambda share: on_stage(
                QUANTIZING, int(STEPS * (layer - first + share)), total
            ),
        )
        tensors = layer_tensors(
            layer,
            self._as_in_files(stored.trunk),
            experts=stored.experts,
            prefix=self.source.prefix,
        )
        write_shard(self._shard(layer + 1), tensors)
        write_json(self._mark(layer), stored.report.to_json())
        self._rows(layer).remove()
        self.listener.on_layer(stored.report)

    def _as_in_files(self, trunk: Mapping[str, Weight]) -> dict[str, Weight]:
        """Plain tensors in the shape that they have in the source's files."""
        return {
            name: weight.view(self.source.file_shape(name))
            if isinstance(weight, Tensor)
            else weight
            for name, weight in trunk.items()
        }

    def _complete(self) -> None:
        """All that is left once the layers are done."""
        output = self.place.output
        shards = [self._shard(number) for number in range(self.layers + 1)]
        checkpoint = write_description(self.source, shards, output)
        marks = [self._mark(layer) for layer in range(self.layers)]
        outer = read_json_object(self._outer_mark)["tensors"]
        report = QuantizationReport(
            manifest=self.manifest,
            size=size_report(checkpoint, self.source),
            outer=tuple(parse_tensor(item, str(self._outer_mark)) for item in outer),
            layers=tuple(parse_layer(read_json_object(mark), str(mark)) for mark in marks),
            evaluation=self.work.compare(output, on_progress=_stage(self.listener, COMPARING)),
            notes=self.notes,
        )
        write_json(output / REPORT_NAME, report.to_json())
        write_file(self.place.complete, b"")

    def _finished_layers(self) -> int:
        """How many layers have their mark; files of the one that was stopped go."""
        finished = 0
        while finished < self.layers and self._mark(finished).exists():
            finished += 1
        keep = self._rows(finished).paths
        for path in self.place.rows.iterdir():
            if path not in keep:
                path.unlink()
        return finished

    @property
    def _outer_mark(self) -> Path:
        return self.place.layers / "outer.json"

    def _mark(self, layer: int) -> Path:
        return self.place.layers / f"layer-{layer:05}.json"

    def _rows(self, layer: int) -> RowFiles:
        """The rows before `layer`."""
        width = self.source.config.hidden_size
        return RowFiles.before(layer, self.place.rows, width=width)

    def _shard(self, number: int) -> Path:
        """The path of shard `number` from 0: embedding and head, then the layers."""
        return self.place.output / shard_name(number + 1, self.layers + 1)


def _stage(listener: Listener, stage: str) -> Callable[[int, int], None]:
    return lambda done, total: listener.on_stage(stage, done, total)


def _sequences(
    source: Source, documents: Sequence[Document], recipe: Recipe
) -> tuple[CalibrationSequence, ...]:
    sequences = make_sequences(
        documents,
        tokenizer=source.tokenizer,
        config=source.config,
        tokens=recipe.calibration_tokens,
        seed=recipe.seed,
        length=min(LENGTH, source.config.max_position_embeddings),
    )
    if not source.has_diffusion:
        sequences = tuple(sequence.without_previews() for sequence in sequences)
    return sequences


def _files(source: Source) -> list[Path]:
    """Every file of the source that is read."""
    return sorted({*source.shards, *description_files(source)})
