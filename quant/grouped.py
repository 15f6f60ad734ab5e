"""A layer whose experts do not fit into memory: read group by group, for many rows at a time.

Group sizes and how many rows go together depend on the model and the texts alone, so that no memory
limit changes a sum.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from clover_local.config import ModelConfig
from clover_local.experts.protocol import ExpertResults, Uncached
from clover_local.kernels.packed import Weight
from clover_local.kernels.route import AnyRouting, Routing
from clover_local.model.clover import Layer
from clover_local.quant import stream
from clover_local.quant.calibration import CalibrationSequence
from clover_local.quant.stream import LayerExperts, MoEInputs, Rows

GROUP_BYTES = 128 << 20  # of experts in float32 that are in memory together
ROWS_TOGETHER = 3072  # or just more: rows for which a group of experts is read
ROWS_AT_ONCE = 512  # of those, how many go through it in one call

ReadExpert = Callable[[int], tuple[Weight, Weight]]


class GroupedExperts(Uncached):
    """A layer's routed experts, read as many at a time as are large enough to matter."""

    def __init__(
        self, config: ModelConfig, read: ReadExpert, *, device: torch.device | str = "cpu"
    ) -> None:
        """`read` gives (gate_up [2F, D], down [D, F]) of an expert."""
        self.read = read
        self.count = config.num_experts
        self.device = device
        expert_bytes = 4 * 3 * config.hidden_size * config.moe_intermediate_size  # float32
        self.group = max(1, min(GROUP_BYTES // expert_bytes, self.count))
        self._all = self._place(range(self.count)) if self.group == self.count else None

    @property
    def waits_because(self) -> str:
        """See `Experts.waits_because`."""
        return "experts are read group by group"

    def forward(self, layer: int, x: Tensor, *, routing: AnyRouting) -> ExpertResults:
        """See `Experts.forward`; `layer` does not matter."""
        total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for start in range(0, self.count, self.group):
            group = range(start, min(start + self.group, self.count))
            ids = routing.expert_ids - start
            ids = ids.masked_fill((ids < 0) | (ids >= len(group)), -1)
            experts = self._all or self._place(group)
            for first in range(0, len(x), ROWS_AT_ONCE):
                some = slice(first, first + ROWS_AT_ONCE)
                own = Routing(ids[some], routing.weights[some])
                total[some] += experts.sum(x[some], own)
        return ExpertResults(total[:, None])

    def _place(self, experts: range) -> LayerExperts:
        return LayerExperts((self.read(expert) for expert in experts), device=self.device)


@dataclass(frozen=True, eq=False)
class Passed:
    """One sequence on its way through a layer."""

    place: slice  # of its rows among those of all sequences
    mixed: Rows  # behind the mixer
    inputs: MoEInputs
    behind: Rows  # the layer


@torch.inference_mode()
def through_layer(
    layer: Layer, sequences: Sequence[CalibrationSequence], read: Callable[[slice], Tensor]
) -> Iterator[Passed]:
    """Takes sequences through a layer, in order; its experts see many at a time.

    Args:
        read: gives the rows at a place before the layer, on its device. A sequence's are asked for
            before it is yielded, and never again.
    """
    moe = layer.moe
    for some in _some_at_a_time(sequences):
        mixed = [
            stream.mix(layer, Rows.split(read(place), sequence), sequence)
            for sequence, place in some
        ]
        inputs = [
            stream.moe_inputs(layer, each, sequence)
            for each, (sequence, _) in zip(mixed, some, strict=True)
        ]
        routed = moe.experts.forward(
            moe.layer,
            torch.cat([each.x for each in inputs]),
            routing=Routing(
                torch.cat([each.routing.expert_ids for each in inputs]),
                torch.cat([each.routing.weights for each in inputs]),
            ),
        )
        parts = torch.split(routed.sum(), [len(each.x) for each in inputs])
        for each, own, part, (_, place) in zip(mixed, inputs, parts, some, strict=True):
            yield Passed(place, each, own, stream.finish(each, own, part))


def places(
    sequences: Sequence[CalibrationSequence],
) -> Iterator[tuple[CalibrationSequence, slice]]:
    """Each sequence with the place of its rows among those of all."""
    start = 0
    for sequence in sequences:
        yield sequence, slice(start, start + sequence.rows)
        start += sequence.rows


def _some_at_a_time(
    sequences: Sequence[CalibrationSequence],
) -> Iterator[list[tuple[CalibrationSequence, slice]]]:
    """Sequences and their rows, as many as have together `ROWS_TOGETHER` rows or just more."""
    some: list[tuple[CalibrationSequence, slice]] = []
    for sequence, place in places(sequences):
        some.append((sequence, place))
        if place.stop - some[0][1].start >= ROWS_TOGETHER:
            yield some
            some = []
    if some:
        yield some
