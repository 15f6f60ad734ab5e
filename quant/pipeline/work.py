"""What a run does to each part of the source: quantize it, or take over what others quantized."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from clover_local.checkpoint.parameters import EMBEDDING, HEAD
from clover_local.kernels.packed import PackedWeight, Weight
from clover_local.quant import stream
from clover_local.quant.memory import MemoryPlan
from clover_local.quant.pipeline.complete import compare
from clover_local.quant.pipeline.experts import DOWN, GATE, UP
from clover_local.quant.pipeline.layer import (
    Calibration,
    LayerRun,
    StoredLayer,
    is_packable,
    round_linear,
)
from clover_local.quant.pipeline.rows import RowFiles
from clover_local.quant.pipeline.source import ForeignSource, GgufSource, PlainSource, Source
from clover_local.quant.profiles import AS_SOURCE, Recipe
from clover_local.quant.report import ExpertReport, LayerReport, TensorReport

OnProgress = Callable[[int, int], None]


class Work(Protocol):
    """The steps of a run. Each raises CloverError where the source or a disk has to be mended."""

    @property
    def source(self) -> Source:
        """What is worked on."""

    def outer(self, rows: RowFiles) -> tuple[dict[str, Weight], TensorReport]:
        """Embedding, norm and head; leaves the rows before the first layer, if there are any."""

    def layer(
        self,
        layer: int,
        *,
        rows: RowFiles,
        behind: RowFiles | None,
        on_progress: Callable[[float], None],
    ) -> StoredLayer:
        """A layer from the rows before it; leaves those behind it, unless it is the last."""

    def compare(self, output: Path, *, on_progress: OnProgress) -> dict[str, Any] | None:
        """The complete result beside its source."""


class Quantizing:
    """Unquantized weights to integers, by a recipe."""

    def __init__(
        self, source: PlainSource, recipe: Recipe, *, plan: MemoryPlan, calibration: Calibration
    ) -> None:
        self.source = source
        self.recipe = recipe
        self.plan = plan
        self.calibration = calibration

    def outer(self, rows: RowFiles) -> tuple[dict[str, Weight], TensorReport]:
        """See `Work.outer`."""
        outer = self.source.outer()
        embedding, head = outer[EMBEDDING], outer[HEAD]
        if not isinstance(embedding, Tensor):
            raise ValueError("the embedding is packed")
        both = (rows.quantized, rows.source)  # alike: embeddings are not quantized
        for file in both if self.recipe.needs_source_rows else both[:1]:
            with file.writer(durable=True) as writer:
                for sequence in self.calibration.sequences:
                    writer.append(stream.embed(sequence, embedding).joined)
        report = TensorReport(HEAD, AS_SOURCE, None, 0.0)
        if head is not embedding:  # not tied
            outer[HEAD], report = round_linear(HEAD, head, bits=self.recipe.head_bits)
        return outer, report

    def layer(
        self,
        layer: int,
        *,
        rows: RowFiles,
        behind: RowFiles | None,
        on_progress: Callable[[float], None],
    ) -> StoredLayer:
        """See `Work.layer`."""
        run = LayerRun(
            self.source,
            layer,
            recipe=self.recipe,
            plan=self.plan,
            calibration=self.calibration,
            rows=rows,
            on_progress=on_progress,
        )
        stored = run.quantize(behind.source if behind else None)
        if behind is not None:
            run.pass_on(stored, behind.quantized)
        run.remove_scratch()
        return stored

    def compare(self, output: Path, *, on_progress: OnProgress) -> dict[str, Any] | None:
        """See `Work.compare`."""
        if not self.recipe.evaluation_tokens:
            return None
        return compare(output, self.source, self.recipe, on_progress=on_progress)


class Importing:
    """Quantized weights as they are: no calibration, no rounding, no comparison."""

    def __init__(self, source: ForeignSource | GgufSource) -> None:
        self.source = source

    def outer(self, rows: RowFiles) -> tuple[dict[str, Weight], TensorReport]:
        """See `Work.outer`."""
        outer = self.source.outer()
        return outer, _imported(HEAD, outer[HEAD])

    def layer(
        self,
        layer: int,
        *,
        rows: RowFiles,
        behind: RowFiles | None,
        on_progress: Callable[[float], None],
    ) -> StoredLayer:
        """See `Work.layer`."""
        trunk = self.source.layer(layer)
        experts = self.source.experts(layer, range(self.source.config.num_experts))
        gate_up, down = experts[0]
        report = LayerReport(
            layer=layer,
            tensors=tuple(
                _imported(name, weight) for name, weight in trunk.items() if is_packable(name)
            ),
            experts=tuple(
                ExpertReport(kind, *_format(weight))
                for kind, weight in ((GATE, gate_up), (UP, gate_up), (DOWN, down))
            ),
            tokens=(),
            few_tokens=(),
            damped=(),
            dead_inputs=0,
        )
        return StoredLayer(trunk, experts, report)

    def compare(self, output: Path, *, on_progress: OnProgress) -> dict[str, Any] | None:
        """See `Work.compare`: the source cannot be run as it is."""
        return None


def _imported(name: str, weight: Weight) -> TensorReport:
    return TensorReport(name, *_format(weight), error=None)


def _format(weight: Weight) -> tuple[int, int | None]:
    if isinstance(weight, PackedWeight):
        return weight.bits, weight.group_size
    return AS_SOURCE, None
