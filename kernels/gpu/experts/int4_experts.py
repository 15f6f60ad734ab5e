"""results[t, a] = weights[t, a] * down_e(silu(gate_e(x[t])) * up_e(x[t])), e = expert_ids[t, a].

Defined by `expert_mlp`, which adds them up as well. Experts are packed records in slots
(`record.py`), of 4 or 8 bits; gate and up may have other bits than down. Two launches:

    expert_gate_up   hidden[place] = silu(gate(x[t])) * up(x[t])     place of (t, a) by expert
    expert_down      results[t, a] = weights[t, a] * down(hidden[place])               float32

`results` has a place for every choice, and what follows adds them in routing order (`add_norm.py`):
which experts were in slots, and in how many waves they came, cannot change a bit.
"""

import torch
from torch import Tensor

from clover_local.kernels.gpu.experts.down import expert_down
from clover_local.kernels.gpu.experts.gate_up import expert_gate_up
from clover_local.kernels.gpu.experts.record import ExpertSlots
from clover_local.kernels.gpu.route import SortedRouting


def expert_results(
    x: Tensor, routing: SortedRouting, *, slots: ExpertSlots, results: Tensor | None = None
) -> Tensor:
    """Each choice's weighted result [T, A, D] float32.

    Args:
        x: [T, D], contiguous.
        routing: of these rows.
        slots: the layer's.
        results: where they go; made if not given. Places of experts that are in no slot, and of
            none, stay as they are.

    Raises:
        ValueError: shapes, dtypes, strides, alignments or devices that do not fit.
    """
    hidden = expert_gate_up(x, routing, experts=slots)
    if results is None:
        shape = (*routing.expert_ids.shape, slots.layout.hidden)
        results = torch.empty(shape, dtype=torch.float32, device=x.device)
    expert_down(hidden, routing, experts=slots, results=results)
    return results
