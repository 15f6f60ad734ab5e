"""Choices by expert, and products of some of them that leave the places of others alone."""

import numpy as np
import torch

from clover_local.experts.choices import Choices, compute_matrices
from clover_local.kernels.dispatch import ExpertMatrices, sum_places
from clover_local.kernels.experts import expert_mlp
from clover_local.kernels.route import Routing

IDS = torch.tensor([[4, 0], [2, -1], [0, 4], [4, 2]])


def test_choices_are_sorted_by_expert_and_those_of_none_are_left_out() -> None:
    choices = Choices.of(IDS, 6)
    assert choices.experts.tolist() == [0, 2, 4] and choices.counts.tolist() == [2, 2, 3]
    assert choices.order.tolist() == [1, 4, 2, 7, 0, 5, 6]
    assert choices.of_experts(np.array([0, 2])).tolist() == [1, 4, 0, 5, 6]
    assert choices.of_experts(np.array([1])).tolist() == [2, 7]


def test_no_choice_at_all_uses_no_expert() -> None:
    assert len(Choices.of(torch.full((3, 2), -1), 6).experts) == 0


def test_waves_in_any_slots_and_order_add_up_to_the_bits_of_all_at_once() -> None:
    torch.manual_seed(6)
    x, weights = torch.randn(4, 40), torch.rand(4, 2) * (IDS >= 0)
    gate_up, down = list(torch.randn(6, 56, 40)), list(torch.randn(6, 40, 28))
    routing, choices = Routing(IDS, weights), Choices.of(IDS, 6)
    results = torch.full((4, 2, 40), torch.nan)
    slot_of = {0: 3, 2: 0, 4: 1}
    experts = {slot: expert for expert, slot in slot_of.items()}
    matrices = [
        ExpertMatrices([all_of[experts.get(slot, 5)] for slot in range(4)])
        for all_of in (gate_up, down)
    ]
    for places in ([1], [0, 2]):
        slots = np.array([slot_of[int(choices.experts[place])] for place in places])
        compute_matrices(
            x,
            routing,
            choices,
            places=np.array(places),
            matrices=(matrices[0], matrices[1], slots),
            results=results,
        )
    expected = expert_mlp(x, routing, gate_up=gate_up, down=down)
    assert torch.equal(sum_places(results, IDS), expected)
    assert bool(results[1, 1].isnan().all())
