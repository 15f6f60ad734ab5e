"""The pick on hand-made tables: bans, confidences, statistics, refusals."""

import math
from typing import Any

import pytest
import torch

from clover_local.decoding.controls import ResponseControls
from clover_local.decoding.pick import RowStatistics, pick
from clover_local.decoding.settings import Settings
from clover_local.errors import CloverError

MASK, VOCABULARY = 6, 7


def settings(**given: Any) -> Settings:
    return Settings(mask_token_id=MASK, vocab_size=VOCABULARY, **given)


def picked(
    logits: list[list[float]],
    given: Settings,
    *,
    response: tuple[int, ...] = (),
    pass_number: int = 0,
) -> RowStatistics:
    controls = ResponseControls(given)
    controls.add(response)
    rows = list(range(len(logits)))
    positions = [len(response) + row + 1 for row in rows]
    return pick(
        torch.tensor(logits),
        controls.at(positions),
        given,
        rows=rows,
        positions=positions,
        pass_number=pass_number,
    )


def test_mask_as_the_raw_argmax_is_neither_picked_nor_in_the_denominator() -> None:
    row = [1.0, 3.0, 2.0, 0.0, 0.0, 0.0, 9.0]
    statistics = picked([row], settings())
    total = sum(math.exp(value) for value in row[:MASK])
    assert statistics.token.tolist() == [1]
    assert statistics.confidence.tolist() == pytest.approx([math.exp(3) / total], abs=1e-6)
    assert MASK not in statistics.top_ids[0].tolist()


def test_lower_id_wins_a_tie() -> None:
    assert picked([[0.0, 5.0, 5.0, 1.0, 5.0, 0.0, 0.0]], settings()).token.tolist() == [1]


def test_the_top_tokens_are_the_lower_ids_where_several_are_equal() -> None:
    made = Settings(mask_token_id=99, vocab_size=100)
    row = torch.zeros(1, 100)
    row[0, [70, 71]] = 1.0
    controls = ResponseControls(made).at([1])
    top = pick(row, controls, made, rows=[0], positions=[1], pass_number=0).top_ids
    assert top.tolist() == [[70, 71, 0, 1, 2]]


def test_a_vocabulary_of_fewer_than_five_has_fewer_top_tokens() -> None:
    made = Settings(mask_token_id=2, vocab_size=3)
    controls = ResponseControls(made).at([1])
    got = pick(torch.zeros(1, 3), controls, made, rows=[0], positions=[1], pass_number=0)
    assert got.top_ids.tolist() == [[0, 1, 2]]
    assert got.top_probabilities.tolist() == [[0.5, 0.5, 0.0]]


def test_statistics_are_those_of_the_controlled_distribution() -> None:
    p = [0.4, 0.3, 0.15, 0.1, 0.04, 0.01]
    logits = [[*(math.log(x) for x in p), 0.0]]
    statistics = picked(logits, settings(presence_penalty=math.log(8)), response=(0,))
    controlled = [p[0] / 8, *p[1:]]
    total = sum(controlled)
    controlled = [x / total for x in controlled]
    assert statistics.token.tolist() == [1]
    assert statistics.confidence.tolist() == pytest.approx([controlled[1]], abs=1e-6)
    assert statistics.raw_confidence.tolist() == pytest.approx([0.3], abs=1e-6)
    entropy = -sum(x * math.log(x) for x in controlled)
    assert statistics.entropy.tolist() == pytest.approx([entropy], abs=1e-6)
    assert statistics.top_ids.tolist() == [[1, 2, 3, 0, 4]]
    expected = sorted(controlled, reverse=True)[:5]
    assert statistics.top_probabilities[0].tolist() == pytest.approx(expected, abs=1e-6)


def test_only_the_asked_rows_are_picked_and_logits_stay() -> None:
    logits = torch.randn(5, VOCABULARY, generator=torch.Generator().manual_seed(3))
    before, given = logits.clone(), settings()
    controls = ResponseControls(given)
    some = pick(logits, controls.at([2, 5]), given, rows=[1, 4], positions=[2, 5], pass_number=0)
    whole = pick(
        logits, controls.at([1]), given, rows=range(5), positions=range(1, 6), pass_number=0
    )
    assert torch.equal(logits, before)
    assert some.token.tolist() == whole.token[[1, 4]].tolist()
    assert some.confidence.tolist() == whole.confidence[[1, 4]].tolist()


@pytest.mark.parametrize("sampling", [{"top_k": 1}, {"top_p": 1e-6}], ids=["top_k", "top_p"])
def test_a_cut_to_one_token_is_greedy_and_does_not_raise_confidence(
    sampling: dict[str, float],
) -> None:
    logits = torch.randn(4, VOCABULARY, generator=torch.Generator().manual_seed(5)).tolist()
    greedy = picked(logits, settings())
    drawn = picked(logits, settings(temperature=3.0, **sampling))
    assert drawn.token.tolist() == greedy.token.tolist()
    assert drawn.confidence.tolist() == greedy.confidence.tolist()


def test_drawn_token_has_its_own_probability_at_temperature_one() -> None:
    logits = torch.randn(30, VOCABULARY, generator=torch.Generator().manual_seed(6))
    statistics = picked(logits.tolist(), settings(temperature=4.0, top_k=3, seed=9))
    logits[:, MASK] = -torch.inf
    expected = logits.softmax(-1).gather(1, statistics.token[:, None])[:, 0]
    assert not torch.equal(statistics.token, logits.argmax(-1))
    assert statistics.confidence.tolist() == pytest.approx(expected.tolist(), abs=1e-6)


def test_draws_depend_on_seed_position_and_pass_only() -> None:
    flat = [[0.0] * VOCABULARY] * 40
    given = settings(temperature=1.0, seed=1)
    first = picked(flat, given).token.tolist()
    assert picked(flat, given).token.tolist() == first
    assert picked(flat[:7], given).token.tolist() == first[:7]
    assert picked(flat, given, response=(0, 0, 0)).token.tolist()[:37] == first[3:]
    assert picked(flat, given, pass_number=1).token.tolist() != first
    assert picked(flat, settings(temperature=1.0, seed=2)).token.tolist() != first


@pytest.mark.parametrize("broken", [math.nan, math.inf], ids=["nan", "inf"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_no_numbers_are_refused(broken: float, temperature: float) -> None:
    rows = [[0.0] * VOCABULARY, [0.0, 1.0, broken, 0.0, 0.0, 0.0, 0.0]]
    with pytest.raises(CloverError, match="response position 2"):
        picked(rows, settings(temperature=temperature))


def test_nan_at_a_banned_id_does_no_harm() -> None:
    row = [0.0, 1.0, 0.0, 0.0, 0.0, 0.0, math.nan]
    assert picked([row], settings()).token.tolist() == [1]


def test_suppressing_the_whole_vocabulary_is_refused() -> None:
    with pytest.raises(CloverError, match="suppress"):
        picked([[0.0] * VOCABULARY], settings(suppress=tuple(range(MASK))))


def test_rows_one_by_one_are_picked_as_thirty_two_at_once() -> None:
    """Draws, controls and biases of each row, bit for bit."""
    made = Settings(
        mask_token_id=999,
        vocab_size=1000,
        stop_ids=(7,),
        temperature=1.3,
        top_k=90,
        top_p=0.9,
        seed=5,
        presence_penalty=0.5,
        repetition_penalty=1.2,
        length_penalty=3.0,
        length_penalty_start=4,
        length_penalty_window=9,
        min_new_tokens=11,
        dry_multiplier=2.0,
    )
    logits = 3 * torch.randn(32, 1000, generator=torch.Generator().manual_seed(8))
    controls = ResponseControls(made)
    controls.add([1, 2, 3, 1, 2])
    positions = [6 + row for row in range(32)]
    block = [999] * 32
    together = pick(
        logits,
        controls.at(positions, visible=block),
        made,
        rows=range(32),
        positions=positions,
        pass_number=3,
    )
    for row, position in enumerate(positions):
        acting = controls.at([position], visible=block)
        alone = pick(logits, acting, made, rows=[row], positions=[position], pass_number=3)
        assert alone.token.tolist() == together.token[[row]].tolist()
        assert alone.top_ids.tolist() == together.top_ids[[row]].tolist()
        for name in ("confidence", "raw_confidence", "entropy", "top_probabilities"):
            assert torch.equal(getattr(alone, name), getattr(together, name)[[row]])
    assert len(set(together.token.tolist())) > 20


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_shares_of_many_draws_are_the_probabilities_at_their_temperature(
    temperature: float,
) -> None:
    """4000 response positions of one distribution; within four standard deviations."""
    p = torch.tensor([0.5, 0.25, 0.15, 0.07, 0.03])
    logits = torch.cat([p.log(), torch.full((2,), -torch.inf)]).expand(4000, VOCABULARY)
    got = picked(logits.tolist(), settings(temperature=temperature, seed=77))
    counts = torch.bincount(got.token, minlength=5)
    expected = (p.log() / temperature).softmax(0)
    spread = (4000 * expected * (1 - expected)).sqrt()
    assert ((counts - 4000 * expected).abs() < 4 * spread).all()
    assert got.confidence.tolist() == pytest.approx(p[got.token].tolist(), abs=1e-6)
