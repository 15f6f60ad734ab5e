"""All routed experts on the model's device."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from clover_local.experts.protocol import ExpertResults, Uncached
from clover_local.kernels import dispatch
from clover_local.kernels.dispatch import AnyRouting, ExpertMatrices
from clover_local.kernels.packed import PackedWeight, Weight

if TYPE_CHECKING:  # Triton is loaded where there is a GPU
    from clover_local.kernels.gpu.experts.record import ExpertSlots

CACHE_LINE = 64
"""BLAS rounds otherwise where a matrix does not start at a multiple of 16 bytes: this is safe."""


class ResidentExperts(Uncached):
    """Every expert on the model's device."""

    def __init__(self, layers: Iterable[tuple[Iterable[Weight], Iterable[Weight]]]) -> None:
        """Takes each layer's experts: gate_up [2F, D], gate first, and down [D, F] of each.

        A tensor [E, 2F, D] is such an iterable too. Large unquantized experts are copied into
        another layout on a CPU, packed ones into records on a GPU; others stay where they are, if
        that is at a multiple of 64 bytes. An iterator that lets go of each pair keeps no layer in
        memory twice.
        """
        self._layers = [_Layer.of(list(gate_up), list(down)) for gate_up, down in layers]

    @property
    def waits_because(self) -> str | None:
        """See `Experts.waits_because`."""
        plain = [number for number, layer in enumerate(self._layers) if layer.slots is None]
        if not plain:
            return None
        return f"the experts of layer {plain[0]} are not packed, or not all in one format"

    @property
    def weights(self) -> list[Weight]:
        """The matrices of all experts that are not in slots."""
        both = [m for layer in self._layers for m in (layer.gate_up, layer.down)]
        return [weight for matrices in both if matrices for weight in matrices.weights]

    @property
    def slots(self) -> list["ExpertSlots"]:
        """The layers' experts that are in slots."""
        return [layer.slots for layer in self._layers if layer.slots is not None]

    def forward(self, layer: int, x: Tensor, *, routing: AnyRouting) -> ExpertResults:
        """See `Experts.forward`."""
        return self._layers[layer].forward(x, routing)


@dataclass(frozen=True, eq=False)
class _Layer:
    """One layer's experts: in slots on a GPU, else as matrices."""

    slots: "ExpertSlots | None"
    gate_up: ExpertMatrices | None
    down: ExpertMatrices | None

    @classmethod
    def of(cls, gate_up: list[Weight], down: list[Weight]) -> "_Layer":
        slots = dispatch.expert_slots(gate_up, down)
        if slots is not None:
            return cls(slots, None, None)
        blocked = (map(_ready, weights) for weights in (gate_up, down))
        return cls(None, *map(ExpertMatrices, blocked))

    def forward(self, x: Tensor, routing: AnyRouting) -> ExpertResults:
        if self.slots is not None:
            results = dispatch.expert_results(x, dispatch.sorted_routing(routing), slots=self.slots)
            return ExpertResults(results, routing.expert_ids)
        assert self.gate_up is not None and self.down is not None
        mixed = dispatch.expert_mlp(
            x, dispatch.plain_routing(routing), gate_up=self.gate_up, down=self.down
        )
        return ExpertResults(mixed[:, None])


def _ready(weight: Weight) -> Weight:
    """The weight as products take it: its bits must not depend on where a file has it."""
    ready = dispatch.blocked_weight(weight)
    if isinstance(ready, PackedWeight) or ready.is_mkldnn or ready.device.type != "cpu":
        return ready
    return ready.clone() if ready.data_ptr() % CACHE_LINE else ready
