"""The one place that picks an operator's implementation; the model calls operators through it.

Today every operator has one implementation, plain PyTorch, and most names below are simply passed
on. `CLOVER_KERNELS` (`reference` or `triton`) overrides the choice, which is made by device
otherwise.
"""

import os

from torch import Tensor

from clover_local.kernels.block_attention import block_attention, causal_attention
from clover_local.kernels.experts import expert_mlp
from clover_local.kernels.gated_delta_commit import (
    causal_conv,
    gated_delta_chunked,
    gated_delta_recurrent,
)
from clover_local.kernels.gated_delta_preview import block_conv, block_softmax
from clover_local.kernels.linear import blocked_weight, linear
from clover_local.kernels.norms import gated_rms_norm, l2_norm, rms_norm, rotary, rotary_angles
from clover_local.kernels.route import Routing, route, route_coreset

__all__ = [
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
]

RECURRENT_ROWS = 4
"""Up to here a loop over rows is cheaper than one chunk."""


def check_choice() -> None:
    """Checks `CLOVER_KERNELS`.

    Raises:
        ValueError: it asks for kernels that do not exist.
    """
    choice = os.environ.get("CLOVER_KERNELS", "reference")
    if choice == "triton":
        raise ValueError("CLOVER_KERNELS=triton: there are no Triton kernels yet, unset it")
    if choice != "reference":
        raise ValueError(f"CLOVER_KERNELS={choice}: the choices are reference and triton")


def gated_delta_commit(
    q: Tensor, k: Tensor, *, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """The gated delta rule, by rows or by chunks; shapes in `gated_delta_commit.py`."""
    if len(q) <= RECURRENT_ROWS:
        return gated_delta_recurrent(q, k, v=v, g=g, beta=beta, state=state)
    size = 32 if len(q) <= 32 else 64
    return gated_delta_chunked(q, k, v=v, g=g, beta=beta, state=state, chunk_size=size)
