"""The one place that knows where the routed experts are; the model hands over rows and routing."""

from collections.abc import Iterable
from typing import Protocol

from torch import Tensor

from clover_local.kernels import dispatch
from clover_local.kernels.dispatch import Routing


class Experts(Protocol):
    """Runs the routed experts of a layer, wherever their weights are."""

    def forward(self, layer: int, x: Tensor, *, routing: Routing) -> Tensor:
        """The weighted sum of each row's experts: `x` [T, D] to [T, D] float32."""
        ...


class ResidentExperts:
    """Every expert on the model's device, unquantized."""

    def __init__(self, layers: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Takes (gate_up [E, 2F, D], down [E, D, F]) of each layer.

        Large experts are copied into another layout on a CPU. An iterator that lets go of each pair
        keeps no layer in memory twice.
        """
        self._gate_up: list[list[Tensor]] = []
        self._down: list[list[Tensor]] = []
        for gate_up, down in layers:
            self._gate_up.append([dispatch.blocked_weight(weight) for weight in gate_up.unbind()])
            self._down.append([dispatch.blocked_weight(weight) for weight in down.unbind()])

    def forward(self, layer: int, x: Tensor, *, routing: Routing) -> Tensor:
        """See `Experts.forward`."""
        return dispatch.expert_mlp(x, routing, gate_up=self._gate_up[layer], down=self._down[layer])
