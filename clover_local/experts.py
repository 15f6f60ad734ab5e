"""The one place that knows where the routed experts are; the model hands over rows and routing."""

from collections.abc import Iterable
from typing import Protocol

from torch import Tensor

from clover_local.kernels import dispatch
from clover_local.kernels.dispatch import ExpertMatrices, Routing
from clover_local.kernels.packed import Weight


class Experts(Protocol):
    """Runs the routed experts of a layer, wherever their weights are."""

    def forward(self, layer: int, x: Tensor, *, routing: Routing) -> Tensor:
        """The weighted sum of each row's experts: `x` [T, D] to [T, D] float32."""
        ...


class ResidentExperts:
    """Every expert on the model's device."""

    def __init__(self, layers: Iterable[tuple[Iterable[Weight], Iterable[Weight]]]) -> None:
        """Takes each layer's experts: gate_up [2F, D], gate first, and down [D, F] of each.

        A tensor [E, 2F, D] is such an iterable too. Large unquantized experts are copied into
        another layout on a CPU; packed ones stay where they are. An iterator that lets go of each
        pair keeps no layer in memory twice.
        """
        self._gate_up: list[ExpertMatrices] = []
        self._down: list[ExpertMatrices] = []
        for gate_up, down in layers:
            self._gate_up.append(ExpertMatrices(map(dispatch.blocked_weight, gate_up)))
            self._down.append(ExpertMatrices(map(dispatch.blocked_weight, down)))

    @property
    def weights(self) -> list[Weight]:
        """The matrices of all experts."""
        return [weight for matrices in self._gate_up + self._down for weight in matrices.weights]

    def forward(self, layer: int, x: Tensor, *, routing: Routing) -> Tensor:
        """See `Experts.forward`."""
        return dispatch.expert_mlp(x, routing, gate_up=self._gate_up[layer], down=self._down[layer])
