"""Acceptance on hand-made tables, and what is kept of a distribution by sampling."""

import math
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

from clover_local.decoding.controls import ResponseControls
from clover_local.decoding.draw import kept_tokens
from clover_local.decoding.settings import Settings
from clover_local.decoding.speculation.acceptance import Judged, judge, typical
from clover_local.errors import CloverError

MASK, VOCABULARY = 5, 6


def table(*rows: list[float]) -> Tensor:
    """Logits of rows of probabilities; MASK has the largest logit of all."""
    logits = [[math.log(p) if p else -50.0 for p in row] + [9.0] for row in rows]
    return torch.tensor(logits)


def judged(
    logits: Tensor, drafts: list[int], *, so_far: tuple[int, ...] = (), **given: Any
) -> Judged:
    settings = Settings(mask_token_id=MASK, vocab_size=VOCABULARY, **given)
    controls = ResponseControls(settings)
    controls.add(so_far)
    position = controls.length + 1
    return judge(logits, controls.along(drafts), settings, drafts=drafts, position=position)


SURE = [0.9, 0.1, 0.0, 0.0, 0.0]
UNSURE = [0.3, 0.25, 0.2, 0.15, 0.1]


@pytest.mark.parametrize(
    ("drafts", "accepted", "boundary"),
    [([0, 0], 2, 0), ([0, 1], 1, 0), ([1, 0], 0, 0), ([MASK, 0], 0, 0)],
)
def test_exact_accepts_what_the_row_would_pick(
    drafts: list[int], accepted: int, boundary: int
) -> None:
    result = judged(table(SURE, UNSURE, UNSURE), drafts, accept="exact")
    assert (result.accepted, result.boundary) == (accepted, boundary)
    assert result.statistics.token.tolist() == [*drafts[:accepted], boundary]
    assert result.statistics.confidence[0].item() == pytest.approx(0.9, abs=1e-5)


def test_of_equal_logits_exact_takes_the_lower_id() -> None:
    row = [0.4, 0.4, 0.2, 0.0, 0.0]
    assert judged(table(row, row), [1], accept="exact").accepted == 0
    assert judged(table(row, row), [0], accept="exact").accepted == 1


def test_typical_compares_with_the_smaller_of_ratio_and_the_entropys_bound() -> None:
    """An unsure row accepts what is likely enough there; a sure one asks for no more than ratio."""
    entropy = -sum(p * math.log(p) for p in UNSURE)
    bound = 0.6 * math.exp(-entropy)  # 0.128
    p = torch.tensor([0.15, 0.1, bound])
    h = torch.full((3,), entropy)
    assert typical(p, h, ratio=0.9, delta=0.6).tolist() == [True, False, True]
    assert typical(p, h, ratio=0.05, delta=0.6).tolist() == [True, True, True]
    assert typical(p, h, ratio=0.9, delta=10.0).tolist() == [False, False, False]
    nothing = torch.zeros(1)
    assert typical(nothing, nothing, ratio=0.0, delta=0.6).tolist() == [False]
    assert typical(nothing, nothing, ratio=0.9, delta=0.0).tolist() == [False]
    result = judged(table(UNSURE, UNSURE, SURE), [3, 4])
    assert (result.accepted, result.boundary) == (1, 0)


def test_drafts_behind_a_refused_one_do_not_count() -> None:
    assert judged(table(SURE, SURE, SURE, SURE), [0, 1, 0], accept="exact").accepted == 1


def test_each_row_has_the_drafts_before_it_in_its_history() -> None:
    """A presence penalty forbids what the first draft has said, and only behind it."""
    row = [0.5, 0.3, 0.2, 0.0, 0.0]
    result = judged(table(row, row, row), [0, 1], accept="exact", presence_penalty=2.0)
    assert (result.accepted, result.boundary) == (2, 2)
    result = judged(table(row, row), [0], so_far=(0,), accept="exact", presence_penalty=2.0)
    assert (result.accepted, result.boundary) == (0, 1)


def test_one_row_alone_is_the_boundary() -> None:
    result = judged(table(SURE), [])
    assert (result.accepted, result.boundary) == (0, 0)
    assert len(result.statistics.token) == 1


def test_logits_that_are_no_numbers_name_the_position() -> None:
    logits = table(SURE, SURE)
    logits[1, 2] = math.nan
    with pytest.raises(CloverError, match="position 4"):
        judged(logits, [0], so_far=(1, 2))
    with pytest.raises(ValueError, match="2 drafts for 2 rows, not 1"):
        judged(table(SURE, SURE), [0, 0])


@pytest.mark.parametrize("draft", [0, 2, 4, MASK])
@pytest.mark.parametrize(
    "cuts",
    [{}, {"top_k": 3}, {"top_p": 0.7}, {"temperature": 0.5, "top_k": 4, "top_p": 0.8}],
    ids=str,
)
def test_accepted_or_not_a_token_has_the_probability_that_a_draw_gives_it(
    draft: int, cuts: dict[str, Any]
) -> None:
    """Chi-square over 4,000 seeds; 1 in 100,000 would be above the bound by chance."""
    given = {"accept": "exact", "temperature": 1.0, **cuts}
    settings = Settings(mask_token_id=MASK, vocab_size=VOCABULARY, **given)
    logits = table(UNSURE, SURE)
    controls = ResponseControls(settings)
    row = controls.along([]).ban(logits[:1].clone())[0]
    ids, probabilities = kept_tokens(
        row, temperature=settings.temperature, top_k=settings.top_k, top_p=settings.top_p
    )
    runs, seen = 4000, Counter[int]()
    for seed in range(runs):
        seen[int(judged(logits, [draft], **given, seed=seed).statistics.token[0])] += 1
    assert set(seen) <= set(ids.tolist())
    expected = runs * probabilities
    observed = torch.tensor([float(seen[token]) for token in ids.tolist()], dtype=torch.float64)
    assert float(((observed - expected) ** 2 / expected).sum()) < 29  # at most 4 degrees of freedom
