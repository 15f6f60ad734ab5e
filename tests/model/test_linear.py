"""Linear maps, alone and stacked."""

import torch

from clover_local.model.linear import Linear


def test_stacked_weights_give_the_outputs_one_after_the_other() -> None:
    torch.manual_seed(1)
    x, first, second = torch.randn(3, 17), torch.randn(5, 17), torch.randn(7, 17)
    stacked = Linear(first, second)(x)
    torch.testing.assert_close(stacked, torch.cat([x @ first.T, x @ second.T], dim=1))


def test_single_small_weight_is_not_copied() -> None:
    weight = torch.randn(5, 17)
    assert Linear(weight).weight is weight
