"""The grouped expert kernels against the plain operator, and what slots must not change."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import ModuleType

import numpy as np
import pytest
import torch
from torch import Tensor

from clover_local.kernels.experts import expert_mlp
from clover_local.kernels.gpu.experts import down as down_module
from clover_local.kernels.gpu.experts import gate_up as gate_up_module
from clover_local.kernels.gpu.experts.down import expert_down
from clover_local.kernels.gpu.experts.gate_up import expert_gate_up
from clover_local.kernels.gpu.experts.int4_experts import expert_results
from clover_local.kernels.gpu.experts.record import (
    ExpertSlots,
    format_of,
    record_layout,
    write_record,
)
from clover_local.kernels.gpu.route import SortedRouting, route_coreset_sorted, route_sorted
from clover_local.kernels.packed import PackedWeight
from clover_local.kernels.residual import sum_places

RoundMatrix = Callable[..., PackedWeight]
EXPERTS, HIDDEN, INNER = 5, 128, 96
SLOT_OF_EXPERT = (3, 0, 6, 2, 5)


@dataclass(frozen=True, eq=False)
class Layer:
    gate_up: list[PackedWeight]
    down: list[PackedWeight]
    slots: ExpertSlots

    def reference(self, x: Tensor, routing: SortedRouting) -> Tensor:
        """Of dequantized weights, so that no compiled kernel takes part."""
        return expert_mlp(
            x.float().cpu(),
            replace(
                routing.routing,
                expert_ids=routing.routing.expert_ids.cpu(),
                weights=routing.routing.weights.cpu(),
            ),
            gate_up=[weight.dequantize() for weight in self.gate_up],
            down=[weight.dequantize() for weight in self.down],
        )

    def only(self, experts: Sequence[int]) -> ExpertSlots:
        """The others are in no slot."""
        kept = [slot if e in experts else -1 for e, slot in enumerate(SLOT_OF_EXPERT)]
        device = self.slots.records.device
        return replace(
            self.slots, slot_of_expert=torch.tensor(kept, dtype=torch.int32, device=device)
        )


MakeLayer = Callable[..., Layer]


@pytest.fixture
def layer(round_matrix: RoundMatrix, device: str) -> MakeLayer:
    def make(
        *,
        bits: tuple[int, int] = (4, 4),
        group_size: int = 32,
        asymmetric: bool = False,
        inner: int = INNER,
    ) -> Layer:
        torch.manual_seed(3)
        gate_up, down = (
            [
                round_matrix(
                    torch.randn(n, k) * k**-0.5,
                    bits=width,
                    group_size=group_size,
                    asymmetric=asymmetric,
                )
                for _ in range(EXPERTS)
            ]
            for n, k, width in ((2 * inner, HIDDEN, bits[0]), (HIDDEN, inner, bits[1]))
        )
        layout = record_layout(
            HIDDEN, inner, gate_up=format_of(gate_up[0]), down=format_of(down[0])
        )
        # Slots without an expert hold bytes that make every scale NaN.
        records = torch.full((7, layout.nbytes), 0xFF, dtype=torch.uint8)
        for expert, slot in enumerate(SLOT_OF_EXPERT):
            write_record(records[slot], layout, gate_up=gate_up[expert], down=down[expert])
        slot_of_expert = torch.tensor(SLOT_OF_EXPERT, dtype=torch.int32, device=device)
        return Layer(gate_up, down, ExpertSlots(records.to(device), layout, slot_of_expert))

    return make


def summed(x: Tensor, routing: SortedRouting, *, slots: ExpertSlots) -> Tensor:
    return sum_places(expert_results(x, routing, slots=slots), routing.expert_ids)


def router_logits(rows: int, *, favourite: float = 0.0) -> Tensor:
    logits = torch.randn(rows, EXPERTS, generator=torch.Generator().manual_seed(rows))
    logits[:, 1] += favourite
    return logits


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("rows", "bits", "asymmetric"),
    [(1, (4, 4), False), (17, (4, 8), True), (33, (8, 4), False)],
    ids=["1-int4", "17-int4-int8-minima", "33-int8-int4"],
)
def test_they_agree_with_the_plain_operator(
    rows: int,
    bits: tuple[int, int],
    asymmetric: bool,
    dtype: torch.dtype,
    layer: MakeLayer,
    device: str,
) -> None:
    experts = layer(bits=bits, asymmetric=asymmetric)
    x = torch.randn(rows, HIDDEN).to(device, dtype)
    # All rows choose expert 1, and it then has tiles of 32 rows and a rest.
    routing = route_sorted(router_logits(rows, favourite=9.0).to(device), top_k=2)
    y = summed(x, routing, slots=experts.slots)
    assert y.dtype == torch.float32
    tolerance = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 1e-2}[dtype]
    torch.testing.assert_close(
        y.cpu(), experts.reference(x, routing), rtol=tolerance, atol=tolerance
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("rows", "group_size", "inner"), [(7, 64, 192), (16, 128, 128), (32, 64, 64)], ids=str
)
def test_groups_may_have_other_sizes(
    rows: int, group_size: int, inner: int, dtype: torch.dtype, layer: MakeLayer, device: str
) -> None:
    experts = layer(group_size=group_size, inner=inner)
    x = torch.randn(rows, HIDDEN).to(device, dtype)
    routing = route_sorted(router_logits(rows).to(device), top_k=2)
    y = summed(x, routing, slots=experts.slots)
    tolerance = {torch.float32: 1e-5, torch.float16: 1e-3}[dtype]
    torch.testing.assert_close(
        y.cpu(), experts.reference(x, routing), rtol=tolerance, atol=tolerance
    )


@pytest.mark.skipif(sys.platform != "linux", reason="memory has to be given when it is written")
def test_a_slot_may_begin_behind_2_31_words(layer: MakeLayer, device: str) -> None:
    """8.6 GB of addresses, of which only one record has memory."""
    experts = layer()
    here, layout = experts.slots.records[SLOT_OF_EXPERT[1]], experts.slots.layout
    far = (1 << 33) // layout.nbytes + 1
    if device == "cpu":
        records = torch.from_numpy(np.zeros((far + 1, layout.nbytes), np.uint8))
    else:
        records = torch.zeros(far + 1, layout.nbytes, dtype=torch.uint8, device=device)
    records[far] = here
    slot_of_expert = torch.tensor([-1, far, -1, -1, -1], dtype=torch.int32, device=device)
    x = torch.randn(3, HIDDEN, device=device)
    routing = route_sorted(router_logits(3, favourite=99.0).to(device), top_k=1)
    y = summed(x, routing, slots=ExpertSlots(records, layout, slot_of_expert))
    assert torch.equal(y, summed(x, routing, slots=experts.slots))


@pytest.mark.parametrize("number", range(len(gate_up_module.CONFIGS)))
def test_configuration_agrees_with_the_plain_operator(
    number: int, layer: MakeLayer, device: str
) -> None:
    experts = layer()
    gate_up, down = gate_up_module.CONFIGS[number], down_module.CONFIGS[number]
    tile_rows, rows = gate_up.largest_m, min(64, gate_up.largest_m + 9)
    x = torch.randn(rows, HIDDEN, device=device)
    logits = router_logits(rows, favourite=2.0).to(device)
    routing = route_sorted(logits, top_k=1, tile_rows=tile_rows)
    assert int(routing.tiles[:, 2].max()) > tile_rows // 2
    hidden = expert_gate_up(x, routing, experts=experts.slots, config=gate_up)
    results = torch.full((rows, 1, HIDDEN), torch.nan, device=device)
    expert_down(hidden, routing, experts=experts.slots, results=results, config=down)
    torch.testing.assert_close(
        sum_places(results, routing.expert_ids).cpu(),
        experts.reference(x, routing),
        rtol=1e-5,
        atol=1e-5,
    )


def test_waves_of_experts_give_the_same_bits(layer: MakeLayer, device: str) -> None:
    experts = layer()
    x = torch.randn(9, HIDDEN, device=device)
    routing = route_sorted(router_logits(9).to(device), top_k=3)
    results = torch.full((9, 3, HIDDEN), torch.nan, device=device)
    for wave in ((4, 1), (), (0, 2), (3,)):
        slots = experts.only(wave)
        hidden = expert_gate_up(x, routing, experts=slots)
        expert_down(hidden, routing, experts=slots, results=results)
        # A place is written if its expert is in a slot, and no other is.
        if wave == (4, 1):
            here = torch.isin(routing.routing.expert_ids.cpu(), torch.tensor(wave))
            assert torch.equal(results.isfinite().all(-1).cpu(), here)
            assert torch.equal(results.isnan().all(-1).cpu(), ~here)
    assert torch.equal(results, expert_results(x, routing, slots=experts.slots))


def test_choices_of_no_expert_are_left_out(layer: MakeLayer, device: str) -> None:
    experts = layer()
    x = torch.randn(6, HIDDEN, device=device)
    logits = router_logits(6, favourite=4.0).to(device)
    routing = route_coreset_sorted(logits, top_k=3, top_p=0.5)
    assert (routing.routing.expert_ids < 0).any()
    y = summed(x, routing, slots=experts.slots)
    torch.testing.assert_close(y.cpu(), experts.reference(x, routing), rtol=1e-5, atol=1e-5)


def test_wrong_calls_are_refused_with_both_values(layer: MakeLayer, device: str) -> None:
    experts = layer()
    x = torch.randn(4, HIDDEN, device=device)
    routing = route_sorted(router_logits(4).to(device), top_k=2)
    with pytest.raises(ValueError, match=r"\(4, 64\), the experts take 128 columns"):
        expert_results(x[:, :64].contiguous(), routing, slots=experts.slots)
    with pytest.raises(ValueError, match="x has 3 rows, the routing 4"):
        expert_results(x[:3].clone(), routing, slots=experts.slots)
    with pytest.raises(ValueError, match=r"slot_of_expert is torch\.int64, not torch\.int32"):
        slots = replace(experts.slots, slot_of_expert=experts.slots.slot_of_expert.long())
        expert_results(x, routing, slots=slots)
    with pytest.raises(ValueError, match="one has"):
        records = experts.slots.records[:, 256:].contiguous()
        expert_results(x, routing, slots=replace(experts.slots, records=records))
    with pytest.raises(ValueError, match="tiles of 128 rows, at most 64"):
        expert_results(x, replace(routing, tile_rows=128), slots=experts.slots)
    with pytest.raises(ValueError, match=r"\(4, 2, 64\) torch.float32, not \(4, 2, 128\)"):
        results = torch.empty(4, 2, 64, device=device)
        hidden = torch.randn(8, INNER, device=device)
        expert_down(hidden, routing, experts=experts.slots, results=results)


@pytest.mark.parametrize("module", [gate_up_module, down_module], ids=lambda m: m.__name__)
def test_gate_compiles_every_configuration(module: ModuleType) -> None:
    compiled = {
        (case.constexprs["BLOCK_N"], case.constexprs["SMALLEST_M"], case.constexprs["SIZES"])
        for case in module.gate_cases()
    }
    assert compiled == {(c.block_n, c.smallest_m, c.sizes) for c in module.CONFIGS}
