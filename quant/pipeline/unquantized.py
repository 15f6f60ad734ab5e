"""The source's own way through a layer: what the quantized model has to come close to."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import Tensor

from clover_local.kernels.packed import Weight
from clover_local.quant import stream
from clover_local.quant.calibration import CalibrationSequence
from clover_local.quant.grouped import GroupedExperts, through_layer
from clover_local.quant.pipeline.rows import RowFile
from clover_local.quant.pipeline.source import PlainSource


@dataclass(frozen=True, eq=False)
class SourceLayer:
    """One layer of the source, and the files [R, D] that its rows come from and go to."""

    source: PlainSource
    layer: int
    rows: RowFile  # before the layer
    mixed: RowFile  # scratch: hidden states behind the mixer
    inputs: RowFile  # scratch: inputs of the routed experts
    device: str

    @torch.inference_mode()
    def run(
        self,
        sequences: Sequence[CalibrationSequence],
        behind: RowFile | None,
        *,
        on_progress: Callable[[float], None] = lambda share: None,
    ) -> None:
        """Writes the rows in the layer and, durably, those behind it, unless it is the last.

        Args:
            on_progress: called with the share that is done.

        Raises:
            CheckpointError: a tensor of the source is damaged, or a file cannot be written.
        """
        config = self.source.config
        layer = stream.build_layer(
            config,
            self.source.layer(self.layer),
            layer=self.layer,
            experts=GroupedExperts(config, self._expert, device=self.device),
            device=self.device,
        )
        total = sum(sequence.rows for sequence in sequences)
        with ExitStack() as files:
            mixed = files.enter_context(self.mixed.writer(durable=False))
            inputs = files.enter_context(self.inputs.writer(durable=False))
            last = files.enter_context(behind.writer(durable=True)) if behind else None
            for passed in through_layer(layer, sequences, self._read):
                mixed.append(passed.mixed.joined)
                inputs.append(passed.inputs.x)
                if last is not None:
                    last.append(passed.behind.joined)
                on_progress(passed.place.stop / total)

    def _expert(self, expert: int) -> tuple[Weight, Weight]:
        (pair,) = self.source.experts(self.layer, [expert])
        return pair

    def _read(self, place: slice) -> Tensor:
        return self.rows.read(place.start, place.stop).to(self.device)
