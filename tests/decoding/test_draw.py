"""Draws against the textbook: sort everything, cut, walk."""

import math

import pytest
import torch
from torch import Tensor

from clover_local.decoding.draw import draw


def textbook(logits: list[float], u: float, *, temperature: float, top_k: int, top_p: float) -> int:
    """One row, in float64, by full sort (lower id first among equals)."""
    scaled = [value / temperature for value in logits]
    kept = sorted(range(len(scaled)), key=lambda i: (-scaled[i], i))
    if top_k:
        cut = scaled[kept[min(top_k, len(kept)) - 1]]
        kept = [i for i in kept if scaled[i] >= cut]
    weights = [math.exp(scaled[i] - scaled[kept[0]]) for i in kept]
    weights = [weight / sum(weights) for weight in weights]
    nucleus = [n for n in range(len(kept)) if n == 0 or sum(weights[:n]) < top_p]
    target, mass = u * sum(weights[n] for n in nucleus), 0.0
    for n in nucleus:
        mass += weights[n]
        if mass > target:
            return kept[n]
    return kept[nucleus[-1]]


def random_rows(rows: int, vocabulary: int, *, spread: float) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(11)
    logits = spread * torch.randn(rows, vocabulary, generator=generator)
    return logits, torch.rand(rows, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("vocabulary", [3, 64, 65, 701])
@pytest.mark.parametrize(
    "temperature, top_k, top_p",
    [
        (1.0, 0, 1.0),
        (0.7, 0, 0.9),
        (1.5, 7, 1.0),
        (1.3, 20, 0.6),
        (0.3, 0, 0.05),
        (2.0, 1000, 0.99),
    ],
)
def test_draw_equals_the_textbook(
    vocabulary: int, temperature: float, top_k: int, top_p: float
) -> None:
    logits, u = random_rows(33, vocabulary, spread=2.0)
    drawn = draw(logits, u, temperature=temperature, top_k=top_k, top_p=top_p)
    expected = [
        textbook(row, x, temperature=temperature, top_k=top_k, top_p=top_p)
        for row, x in zip(logits.double().tolist(), u.tolist(), strict=True)
    ]
    assert drawn.tolist() == expected
    if vocabulary > 3 and top_p > 0.5:
        assert drawn.tolist() != logits.argmax(-1).tolist()  # the cases are no mere argmax


def test_flat_distribution_walks_ids_in_order() -> None:
    """All tokens equal: the prefix must be widened to the whole vocabulary."""
    u = torch.tensor([0.0, 0.25, 0.5, 0.999], dtype=torch.float64)
    drawn = draw(torch.zeros(4, 1000), u, temperature=1.0, top_k=0, top_p=1.0)
    assert drawn.tolist() == [0, 250, 500, 999]


def test_ties_at_the_top_k_cut_stay() -> None:
    logits = torch.tensor([[1.0, 3.0, 1.0, 0.0, 1.0]]).expand(4, 5)
    u = torch.tensor([0.0, 0.4, 0.6, 0.9], dtype=torch.float64)  # shares: 0.33, then 0.22 each
    drawn = draw(logits, u, temperature=5.0, top_k=2, top_p=1.0)
    assert drawn.tolist() == [1, 0, 2, 4]


def test_first_token_stays_under_a_tiny_top_p() -> None:
    logits, u = random_rows(17, 300, spread=0.5)
    drawn = draw(logits, u, temperature=1.0, top_k=0, top_p=1e-9)
    assert drawn.tolist() == logits.argmax(-1).tolist()


def test_mass_before_a_token_has_to_be_below_top_p() -> None:
    """Two equal tokens: half of the mass stands before the second."""
    logits = torch.tensor([[1.0, 0.0, 1.0]]).expand(2, 3)
    last = torch.tensor([0.999, 0.999], dtype=torch.float64)
    assert draw(logits, last, temperature=1.0, top_k=2, top_p=0.5).tolist() == [0, 0]
    assert draw(logits, last, temperature=1.0, top_k=2, top_p=0.51).tolist() == [2, 2]


@pytest.mark.parametrize("temperature", [1e-3, 1e-30, 1e-300])
def test_vanishing_temperature_is_greedy(temperature: float) -> None:
    logits, u = random_rows(9, 200, spread=3.0)
    drawn = draw(logits, u, temperature=temperature, top_k=0, top_p=1.0)
    assert drawn.tolist() == logits.argmax(-1).tolist()


@pytest.mark.parametrize("top_k", [0, 4])
def test_banned_tokens_are_never_drawn(top_k: int) -> None:
    """Two tokens are left, fewer than top_k: the draw at the far end still lands on one of them."""
    logits = torch.full((2, 70), -torch.inf)
    logits[:, 69], logits[:, 3] = 1.0, 0.5
    u = torch.tensor([0.0, 1 - 2**-24], dtype=torch.float64)
    drawn = draw(logits, u, temperature=1.0, top_k=top_k, top_p=1.0)
    assert drawn.tolist() == [69, 3]


def test_shares_of_a_thousand_draws_follow_the_probabilities() -> None:
    p = torch.tensor([0.1, 0.6, 0.3])
    u = (torch.arange(1000, dtype=torch.float64) + 0.5) / 1000
    drawn = draw(p.log().expand(1000, 3), u, temperature=1.0, top_k=0, top_p=1.0)
    assert torch.bincount(drawn).tolist() == [100, 600, 300]
