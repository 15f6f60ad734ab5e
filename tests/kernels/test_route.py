"""Routing and coresets on hand-made tables."""

import pytest
import torch

from clover_local.kernels.route import block_coreset, distinct_experts, route, route_coreset

SURE = 200.0  # a softmax with one logit this high above the others is exactly 1 there


def sure_rows(*experts: int, of: int) -> torch.Tensor:
    """Router logits of rows that each put all probability on one expert."""
    logits = torch.zeros(len(experts), of)
    logits[range(len(experts)), list(experts)] = SURE
    return logits


def test_weights_are_the_chosen_probabilities_divided_by_their_sum() -> None:
    torch.manual_seed(1)
    logits = torch.randn(7, 11)
    routing = route(logits, top_k=3)
    probs = logits.double().softmax(-1)
    best = probs.topk(3, dim=-1)
    assert torch.equal(routing.expert_ids, best.indices)
    expected = best.values / best.values.sum(-1, keepdim=True)
    torch.testing.assert_close(routing.weights, expected.float())


def test_lower_index_wins_a_tie() -> None:
    logits = torch.tensor([[1.0, 2.0, 1.0, 2.0, 1.0], [0.0] * 5])
    assert route(logits, top_k=3).expert_ids.tolist() == [[1, 3, 0], [0, 1, 2]]
    # 41 equal logits: more than any sort does by insertion
    assert route(torch.zeros(1, 41), top_k=5).expert_ids.tolist() == [[0, 1, 2, 3, 4]]


def test_probabilities_that_underflow_keep_their_order() -> None:
    routing = route(torch.tensor([[0.0, 1000.0, 10.0, 20.0]]), top_k=3)
    assert routing.expert_ids.tolist() == [[1, 3, 2]]


@pytest.mark.parametrize(
    ("top_p", "kept"),
    [
        (0.0, [0]),
        (0.5, [0]),
        (0.51, [0, 1]),
        (0.75, [0, 1]),
        (0.76, [0, 1, 2]),
        (1.0, [0, 1, 2]),
        (9.0, [0, 1, 2]),
    ],
)
def test_coreset_keeps_experts_while_the_mass_before_is_below_top_p(
    top_p: float, kept: list[int]
) -> None:
    # Totals 2, 1, 1, 0: shares 1/2, 1/4, 1/4, 0; experts 1 and 2 tie.
    logits = sure_rows(2, 0, 1, 0, of=4)
    assert block_coreset(logits, top_k=1, top_p=top_p).nonzero()[:, 0].tolist() == kept


def test_coreset_counts_only_a_rows_own_top_experts() -> None:
    # Expert 2 is second in both rows, with more probability in all than either first choice.
    logits = torch.tensor([[0.50, 0.02, 0.48], [0.02, 0.50, 0.48]]).log()
    assert block_coreset(logits, top_k=1, top_p=0.01).tolist() == [True, False, False]
    assert block_coreset(logits, top_k=2, top_p=0.01).tolist() == [False, False, True]


def test_full_coreset_loses_no_expert_to_rounding() -> None:
    torch.manual_seed(2)
    logits = torch.randn(64, 256)
    chosen = sorted(set(route(logits, top_k=8).expert_ids.flatten().tolist()))
    coreset = block_coreset(logits, top_k=8, top_p=1.0)
    assert coreset.nonzero()[:, 0].tolist() == chosen


def test_rows_route_again_inside_the_coreset() -> None:
    logits = torch.tensor([[3.0, 1.0, 2.0, 0.0], [3.0, 0.0, 1.0, 2.0], [4.0, 1.0, 3.0, 0.0]])
    routing, coreset = route_coreset(logits, top_k=2, top_p=0.9)
    assert coreset.tolist() == [True, False, True, False]
    assert routing.expert_ids.tolist() == [[0, 2], [0, 2], [0, 2]]
    torch.testing.assert_close(routing.weights, logits[:, [0, 2]].softmax(-1))


def test_row_with_fewer_experts_than_top_k_has_none_in_the_places_left() -> None:
    routing, coreset = route_coreset(sure_rows(4, 4, 1, of=6), top_k=3, top_p=0.5)
    assert coreset.nonzero()[:, 0].tolist() == [4]
    # The third row would rather have expert 1 and gives expert 4 a probability of 0.
    assert routing.expert_ids.tolist() == [[4, -1, -1]] * 3
    assert routing.weights.tolist() == [[1.0, 0.0, 0.0]] * 3


def test_distinct_experts_are_counted_per_layer_without_the_empty_slots() -> None:
    layers = [torch.tensor([[0, 3], [3, -1]]), torch.tensor([[1, 2], [4, 0]])]
    assert float(distinct_experts(layers, 5)) == 2 + 4
    assert float(distinct_experts([], 5)) == 0
