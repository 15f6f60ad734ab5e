"""How many experts a pass uses, summed over its layers.

Defined by `distinct_experts` (the plain operator). One launch behind the stack of the layers' ids,
where operators of torch are five. A program has a layer; whichever is last knows the sum.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from clover_local.kernels.gpu.check import check_dense
from clover_local.kernels.gpu.gate import GateCase

MOST_EXPERTS = 4096
BLOCK = 256
"""Choices of a layer at once: a pass has 32 rows and 8 experts a row."""
WARPS = 4
_ONE_USED = tl.constexpr(1 << 32)


@triton.jit(do_not_specialize=["choices"])
def distinct_kernel(
    expert_ids,
    counter,
    distinct,
    choices,
    BLOCK_E: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program (layer); -1 is no expert. The counter is 0 before and after."""
    layer = tl.program_id(0)
    uses = tl.zeros([BLOCK_E], tl.int32)
    for first in range(0, choices, BLOCK):
        choice = first + tl.arange(0, BLOCK)
        ids = tl.load(expert_ids + layer * choices + choice, mask=choice < choices, other=-1)
        uses += tl.histogram(tl.maximum(ids, 0).to(tl.int32), BLOCK_E, mask=ids >= 0)
    used = tl.sum((uses > 0).to(tl.int64), axis=0)
    # Upper half: experts so far; lower half: layers. Both by one addition, so none comes between.
    before = tl.atomic_add(counter, used * _ONE_USED + 1, sem="acq_rel", scope="gpu")
    if before % _ONE_USED == tl.num_programs(0) - 1:
        tl.store(distinct, (before // _ONE_USED + used).to(tl.float64))
        tl.store(counter, 0)


def distinct_experts(
    expert_ids: Sequence[Tensor], num_experts: int, *, counter: Tensor | None = None
) -> Tensor:
    """As the plain operator of this name: a float64 scalar on the device.

    Args:
        expert_ids: per layer [T, A] int64, -1 where a row used fewer; all of one shape, at least
            one.
        num_experts: E, at most 4,096.
        counter: [1] int64, a zero that no other launch uses at the same time; made if not given.

    Raises:
        ValueError: no layers, other dtypes, or more experts.
    """
    kinds = sorted({str(ids.dtype) for ids in expert_ids})
    if kinds != ["torch.int64"]:
        raise ValueError(f"{len(expert_ids)} layers of {kinds}")
    if not 1 <= num_experts <= MOST_EXPERTS:
        raise ValueError(f"{num_experts} experts, from 1 to {MOST_EXPERTS} fit in a program")
    ids = torch.stack(list(expert_ids)).flatten(1)
    layers, choices = ids.shape
    if counter is None:
        counter = torch.zeros(1, dtype=torch.int64, device=ids.device)
    check_dense("counter", counter, shape=[1], like=ids, dtype=torch.int64)
    distinct = torch.empty((), dtype=torch.float64, device=ids.device)
    distinct_kernel[(layers,)](
        expert_ids=ids,
        counter=counter,
        distinct=distinct,
        choices=choices,
        BLOCK_E=triton.next_power_of_2(num_experts),
        BLOCK=BLOCK,
        num_warps=WARPS,
    )
    return distinct


def gate_cases() -> tuple[GateCase, ...]:
    """The real model: 256 experts."""
    types = {"expert_ids": "*i64", "counter": "*i64", "distinct": "*fp64", "choices": "i32"}
    return (
        GateCase(
            name="distinct_experts",
            fn=distinct_kernel,
            signature=types,
            constexprs={"BLOCK_E": 256, "BLOCK": BLOCK},
            num_warps=WARPS,
            num_stages=1,
        ),
    )
