"""The baseline of the bench is a correct kernel too."""

from collections.abc import Callable

import pytest
import torch

from clover_local.kernels.gpu.experts.plain_wna16 import plain_wna16
from clover_local.kernels.gpu.experts.record import (
    ExpertSlots,
    format_of,
    record_layout,
    write_record,
)
from clover_local.kernels.gpu.route import route_sorted
from clover_local.kernels.packed import PackedWeight

RoundMatrix = Callable[..., PackedWeight]


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("matrix", ["gate", "up", "down"])
def test_every_choice_is_multiplied_by_its_experts_matrix(
    matrix: str, bits: int, round_matrix: RoundMatrix, device: str
) -> None:
    torch.manual_seed(4)
    down = [round_matrix(torch.randn(96, 96), bits=bits) for _ in range(3)]
    gate_up = [round_matrix(torch.randn(2 * 96, 96), bits=bits) for _ in range(3)]
    layout = record_layout(96, 96, gate_up=format_of(gate_up[0]), down=format_of(down[0]))
    records = torch.zeros(3, layout.nbytes, dtype=torch.uint8)
    for expert in range(3):
        write_record(records[expert], layout, gate_up=gate_up[expert], down=down[expert])
    slots = torch.tensor([0, 1, 2], dtype=torch.int32, device=device)
    routing = route_sorted(torch.randn(19, 3, device=device), top_k=2)
    x = torch.randn(38 if matrix == "down" else 19, 96, device=device)
    y = plain_wna16(
        x,
        routing,
        experts=ExpertSlots(records.to(device), layout, slots),
        matrix=matrix,
    )
    weights = {
        "gate": [weight.dequantize()[:96] for weight in gate_up],
        "up": [weight.dequantize()[96:] for weight in gate_up],
        "down": [weight.dequantize() for weight in down],
    }[matrix]
    rows = x.cpu() if matrix == "down" else x.cpu().repeat_interleave(2, dim=0)
    ids = routing.routing.expert_ids.flatten().tolist()
    expected = torch.stack([weights[e] @ row for e, row in zip(ids, rows, strict=True)])
    torch.testing.assert_close(y.cpu(), expected, rtol=1e-5, atol=1e-4)


def test_another_matrix_is_refused(round_matrix: RoundMatrix, device: str) -> None:
    gate_up, down = round_matrix(torch.randn(64, 32)), round_matrix(torch.randn(32, 32))
    layout = record_layout(32, 32, gate_up=format_of(gate_up), down=format_of(down))
    records = torch.zeros(1, layout.nbytes, dtype=torch.uint8, device=device)
    slots = torch.zeros(1, dtype=torch.int32, device=device)
    routing = route_sorted(torch.zeros(2, 1, device=device), top_k=1)
    x = torch.zeros(2, 32, device=device)
    with pytest.raises(ValueError, match="no matrix 'gates', only gate, up, down"):
        plain_wna16(x, routing, experts=ExpertSlots(records, layout, slots), matrix="gates")
