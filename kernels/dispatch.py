"""The one place that picks an operator's implementation; the model calls operators through it.

Products with packed weights have compiled kernels on a CPU; every other operator has one
implementation, plain PyTorch, and most names below are simply passed on. `CLOVER_KERNELS`
(`reference` or `triton`) overrides the choice, which is made by device otherwise.
"""

from torch import Tensor

from clover_local.kernels.block_attention import block_attention, causal_attention
from clover_local.kernels.choice import check_choice
from clover_local.kernels.experts import ExpertMatrices, expert_mlp
from clover_local.kernels.gated_delta_commit import (
    causal_conv,
    gated_delta_chunked,
    gated_delta_recurrent,
)
from clover_local.kernels.gated_delta_preview import block_conv, block_softmax
from clover_local.kernels.linear import blocked_weight, linear
from clover_local.kernels.native.build import Missing
from clover_local.kernels.native.launch import kernel_for
from clover_local.kernels.norms import gated_rms_norm, l2_norm, rms_norm, rotary, rotary_angles
from clover_local.kernels.packed import Weight
from clover_local.kernels.route import Routing, route, route_coreset

__all__ = [
    "ExpertMatrices",
    "Routing",
    "block_attention",
    "block_conv",
    "block_softmax",
    "blocked_weight",
    "causal_attention",
    "causal_conv",
    "check_choice",
    "expert_mlp",
    "gated_delta_commit",
    "gated_rms_norm",
    "l2_norm",
    "linear",
    "rms_norm",
    "rotary",
    "rotary_angles",
    "route",
    "route_coreset",
    "weight_kernel",
]

RECURRENT_ROWS = 4
"""Up to here a loop over rows is cheaper than one chunk."""


def gated_delta_commit(
    q: Tensor, k: Tensor, *, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """The gated delta rule, by rows or by chunks; shapes in `gated_delta_commit.py`."""
    if len(q) <= RECURRENT_ROWS:
        return gated_delta_recurrent(q, k, v=v, g=g, beta=beta, state=state)
    size = 32 if len(q) <= 32 else 64
    return gated_delta_chunked(q, k, v=v, g=g, beta=beta, state=state, chunk_size=size)


def weight_kernel(weight: Weight) -> str:
    """How a weight is stored and what multiplies with it, for people."""
    if isinstance(weight, Tensor):
        name = str(weight.dtype).removeprefix("torch.")
        return f"{name} by oneDNN" if weight.is_mkldnn else f"{name} by torch"
    kernel = kernel_for(weight)
    by = f"torch ({kernel.reason})" if isinstance(kernel, Missing) else kernel.target.name
    return f"INT{weight.bits} in groups of {weight.group_size} by {by}"
