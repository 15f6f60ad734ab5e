"""One decoder layer: trunk rounded, experts quantized on the rows that they get, rows passed on.

The next layer is calibrated on what this layer makes of the rows once it is quantized, trunk
included, so that it can make good some of what was lost. For GPTQ the source goes the same way on
rows of its own, which say what was lost.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from clover_local.checkpoint.parameters import kind_of
from clover_local.errors import CloverError
from clover_local.experts.protocol import ExpertResults, Uncached
from clover_local.kernels.packed import PackedWeight, Weight
from clover_local.kernels.route import AnyRouting
from clover_local.model.clover import Layer
from clover_local.quant import stream
from clover_local.quant.allocator import give_back
from clover_local.quant.calibration import CalibrationSequence
from clover_local.quant.memory import PIECE_NUMBERS, MemoryPlan
from clover_local.quant.pipeline.experts import quantize_experts
from clover_local.quant.pipeline.routed import RoutedRows, SourceRows
from clover_local.quant.pipeline.rows import RowFile, RowFiles
from clover_local.quant.pipeline.source import PlainSource
from clover_local.quant.pipeline.unquantized import SourceLayer
from clover_local.quant.profiles import AS_SOURCE, Recipe, trunk_group_size
from clover_local.quant.report import LayerReport, TensorReport
from clover_local.quant.rounding import round_to_nearest

SOURCE_SHARE, MIXED_SHARE, EXPERTS_SHARE = 0.2, 0.3, 0.9
"""Of a layer's time, what is over when the source's pass, the mixer and the experts are done; the
rest passes the rows on."""


@dataclass(frozen=True, eq=False)
class StoredLayer:
    """A layer as it is stored, and its report."""

    trunk: Mapping[str, Weight]  # by name without prefix
    experts: Sequence[tuple[Weight, Weight]]  # (gate_up [2F, D], down [D, F])
    report: LayerReport


@dataclass(frozen=True)
class Calibration:
    """The sequences, and where the rows of each lie among all."""

    sequences: Sequence[CalibrationSequence]
    preview_weight: float

    @property
    def starts(self) -> list[int]:
        """The first row of each sequence, and at the end the number of rows."""
        return [*accumulate((sequence.rows for sequence in self.sequences), initial=0)]

    def row_weights(self) -> Tensor:
        """What each row counts for in a Hessian, [R]."""
        parts = [
            torch.full((rows,), weight)
            for sequence in self.sequences
            for rows, weight in (
                (len(sequence.tokens), 1.0),
                (sequence.preview_rows, self.preview_weight),
            )
        ]
        return torch.cat(parts)


class LayerRun:
    """One layer on its way: rows in, quantized, rows out."""

    def __init__(
        self,
        source: PlainSource,
        layer: int,
        *,
        recipe: Recipe,
        plan: MemoryPlan,
        calibration: Calibration,
        rows: RowFiles,
        on_progress: Callable[[float], None] = lambda share: None,
    ) -> None:
        """Takes the hidden states before the layer in `rows`; scratch files lie beside them."""
        folder, width = rows.quantized.path.parent, rows.quantized.width
        self.source = source
        self.layer = layer
        self.recipe = recipe
        self.plan = plan
        self.calibration = calibration
        self.rows = rows.quantized
        self.mixed = RowFile(folder / "mixed.rows", width)
        self.inputs = RowFile(folder / "inputs.rows", width)
        self.source_layer = SourceLayer(
            source,
            layer,
            rows=rows.source,
            mixed=RowFile(folder / "source-mixed.rows", width),
            inputs=RowFile(folder / "source-inputs.rows", width),
            device=recipe.device,
        )
        self.on_progress = on_progress
        self._built: Layer | None = None

    def quantize(self, source_behind: RowFile | None) -> StoredLayer:
        """Quantizes the layer.

        Args:
            source_behind: takes the source's rows behind the layer, if the method needs them.

        Raises:
            CloverError: a tensor of the source is damaged, or no row reached an expert.
        """
        config, recipe = self.source.config, self.recipe
        if recipe.needs_source_rows:
            self.source_layer.run(
                self.calibration.sequences,
                source_behind,
                on_progress=lambda share: self.on_progress(SOURCE_SHARE * share),
            )
            give_back()
        trunk, tensors = round_trunk(self.source.layer(self.layer), recipe)
        self._built = stream.build_layer(
            config, trunk, layer=self.layer, experts=_None(), device=recipe.device
        )
        routed = self._mix(self._built)
        give_back()
        experts = quantize_experts(
            routed,
            lambda chosen: self.source.experts(self.layer, chosen),
            inner_size=config.moe_intermediate_size,
            recipe=recipe,
            plan=self.plan,
            on_progress=lambda share: self.on_progress(
                MIXED_SHARE + (EXPERTS_SHARE - MIXED_SHARE) * share
            ),
        )
        tokens = routed.counts().tolist()
        few = [expert for expert, count in enumerate(tokens) if count < recipe.min_tokens]
        report = LayerReport(
            layer=self.layer,
            tensors=tuple(tensors),
            experts=tuple(experts.reports),
            tokens=tuple(tokens),
            few_tokens=tuple(few),
            damped=tuple(experts.damped),
            dead_inputs=experts.dead_inputs,
        )
        return StoredLayer(trunk, experts.pairs, report)

    @torch.inference_mode()
    def pass_on(self, stored: StoredLayer, target: RowFile) -> None:
        """Writes the rows behind the quantized layer to `target`, durably."""
        layer, device = self._built, self.recipe.device
        if layer is None:
            raise ValueError("quantize the layer first")
        experts = stream.LayerExperts(stored.experts, device=device)
        self.remove_inputs()
        starts = self.calibration.starts
        with target.writer(durable=True) as writer:
            for sequence, start in zip(self.calibration.sequences, starts, strict=False):
                rows = self._read(self.mixed, sequence, start)
                inputs = stream.moe_inputs(layer, rows, sequence)
                routed = experts.sum(inputs.x, inputs.routing)
                writer.append(stream.finish(rows, inputs, routed).joined)
                done = start / starts[-1]
                self.on_progress(EXPERTS_SHARE + (1 - EXPERTS_SHARE) * done)
        give_back()

    def remove_inputs(self) -> None:
        """Deletes the files that only the layer's experts needed."""
        for file in (self.inputs, self.source_layer.inputs, self.source_layer.mixed):
            file.remove()

    def remove_scratch(self) -> None:
        """Deletes the files that only this layer needed."""
        self.remove_inputs()
        self.mixed.remove()

    @torch.inference_mode()
    def _mix(self, layer: Layer) -> RoutedRows:
        """Runs the mixer over all sequences; leaves the experts' inputs in a file."""
        expert_ids = []
        starts = self.calibration.starts
        with (
            self.mixed.writer(durable=False) as mixed,
            self.inputs.writer(durable=False) as inputs,
        ):
            for sequence, start in zip(self.calibration.sequences, starts, strict=False):
                rows = stream.mix(layer, self._read(self.rows, sequence, start), sequence)
                moe = stream.moe_inputs(layer, rows, sequence)
                mixed.append(rows.joined)
                inputs.append(moe.x)
                expert_ids.append(moe.routing.expert_ids.cpu())
                done = start / starts[-1]
                self.on_progress(SOURCE_SHARE + (MIXED_SHARE - SOURCE_SHARE) * done)
        source = SourceRows(
            self.source_layer.inputs, mixed=self.source_layer.mixed, quantized_mixed=self.mixed
        )
        return RoutedRows(
            self.inputs,
            torch.cat(expert_ids),
            self.calibration.row_weights(),
            self.source.config.num_experts,
            self.recipe.device,
            source if self.recipe.needs_source_rows else None,
        )

    def _read(self, file: RowFile, sequence: CalibrationSequence, start: int) -> stream.Rows:
        joined = file.read(start, start + sequence.rows).to(self.recipe.device)
        return stream.Rows.split(joined, sequence)


class _None(Uncached):
    """Stands where the layer's experts will be: rows are only led up to them."""

    waits_because = "there are no experts yet"

    def forward(self, layer: int, x: Tensor, *, routing: AnyRouting) -> ExpertResults:
        raise CloverError(f"the experts of layer {layer} are not there yet")


def round_trunk(
    parameters: Mapping[str, Weight], recipe: Recipe
) -> tuple[dict[str, Weight], list[TensorReport]]:
    """A layer's packable matrices to `recipe.trunk_bits`; all other parameters as they are."""
    rounded = dict(parameters)
    reports = []
    for name, weight in parameters.items():
        if is_packable(name):
            rounded[name], report = round_linear(name, weight, bits=recipe.trunk_bits)
            reports.append(report)
    return rounded, reports


def is_packable(name: str) -> bool:
    """Whether a parameter, by its name without prefix, is a matrix that may be packed."""
    return kind_of(name).packable


def round_linear(name: str, weight: Weight, *, bits: int) -> tuple[Weight, TensorReport]:
    """A matrix in `bits`; as it is where that is `AS_SOURCE` or no group size divides."""
    group_size = trunk_group_size(weight.shape[1]) if bits < AS_SOURCE else None
    if group_size is None or not isinstance(weight, Tensor):
        return weight, TensorReport(name, AS_SOURCE, None, 0.0)
    packed, error = round_matrix(weight, bits, group_size=group_size)
    return packed, TensorReport(name, bits, group_size, error)


def round_matrix(weight: Tensor, bits: int, *, group_size: int) -> tuple[PackedWeight, float]:
    """A matrix [N, K] rounded some rows at a time, and the share of its square that was lost."""
    step = max(1, PIECE_NUMBERS // weight.shape[1])
    data, scales = [], []
    lost = whole = 0.0
    for start in range(0, len(weight), step):
        piece = weight[start : start + step].float()
        rounded = round_to_nearest(piece, bits=bits, group_size=group_size)
        packed = rounded.pack()
        data.append(packed.data)
        scales.append(packed.scale)
        lost += float((piece - rounded.dequantize()).square().sum(dtype=torch.float64))
        whole += float(piece.square().sum(dtype=torch.float64))
    packed = PackedWeight(torch.cat(data), torch.cat(scales), None, bits, group_size)
    return packed, lost / whole if whole else 0.0
