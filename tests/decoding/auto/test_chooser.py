"""The choice among modes, from numbers alone."""

import itertools

import pytest

from clover_local.decoding.auto.chooser import Choice, Chooser, Step, projected

Rates = dict[str, tuple[float, float]]
"""By mode: tokens a stretch, milliseconds a stretch of ten forwards."""


def run(chooser: Chooser, rates: Rates, *, stretches: int) -> list[Choice]:
    """Choices where every stretch of a mode comes to the same."""
    made = []
    for _ in range(stretches):
        choice = chooser.choose()
        tokens, milliseconds = rates[choice.mode]
        chooser.record(choice, Step(tokens, 10, milliseconds))
        made.append(choice)
    return made


PROSE: Rates = {"denoise": (11, 74), "draft": (17, 59), "ar": (10, 29)}
CODE: Rates = {"denoise": (26, 74), "draft": (50, 59), "ar": (10, 29)}
MATHS: Rates = {"denoise": (60, 74), "draft": (20, 59), "ar": (10, 29)}
MODES = ("denoise", "draft", "ar")


@pytest.mark.parametrize(
    ("rates", "best"),
    [(PROSE, "ar"), (CODE, "draft"), (MATHS, "denoise")],
    ids=["prose", "code", "maths"],
)
def test_the_fastest_mode_runs_and_the_others_are_only_probed(rates: Rates, best: str) -> None:
    chooser = Chooser(MODES)
    choices = run(chooser, rates, stretches=1000)
    assert {choice.mode for choice in choices[:3]} == set(MODES)
    assert {choice.mode for choice in choices[30:] if not choice.is_probe} == {best}
    spent = sum(rates[choice.mode][1] for choice in choices)
    tokens = sum(rates[choice.mode][0] for choice in choices)
    assert tokens / spent > 0.93 * rates[best][0] / rates[best][1]
    use = chooser.use()
    assert use.mode == use.rates[0].mode == best
    assert use.line.startswith(f"{best}: ")
    assert all(mode in use.line for mode in MODES)


def test_a_text_that_changes_changes_the_mode() -> None:
    chooser = Chooser(MODES)
    run(chooser, PROSE, stretches=100)
    choices = run(chooser, CODE, stretches=300)
    assert chooser.use().mode == "draft"
    assert [choice.mode for choice in choices[-20:]].count("draft") >= 17


def test_a_first_stretch_that_pays_for_what_is_made_once_is_forgiven() -> None:
    chooser = Chooser(["ar", "draft"])
    for milliseconds in (5000.0, 60.0):
        chooser.record(Choice("draft", True, ""), Step(50, 10, milliseconds))
    (rate,) = chooser.use().rates
    assert rate.ms_per_forward == 6.0


def test_modes_that_are_as_fast_do_not_take_turns() -> None:
    rates = {"denoise": (30.0, 70.0), "draft": (31.0, 70.0)}
    chooser = Chooser(["denoise", "draft"])
    choices = run(chooser, rates, stretches=200)
    own = [choice.mode for choice in choices[20:] if not choice.is_probe]
    assert sum(a != b for a, b in itertools.pairwise(own)) <= 8


def test_one_mode_alone_is_never_probed_and_none_is_refused() -> None:
    chooser = Chooser(["draft"])
    assert {choice.is_probe for choice in run(chooser, CODE, stretches=40)} == {False}
    with pytest.raises(ValueError, match="0 modes"):
        Chooser([])


def test_a_stretch_without_forwards_says_nothing() -> None:
    chooser = Chooser(MODES)
    chooser.record(chooser.choose(), Step(1, 0, 0.0))
    assert chooser.use().rates == ()


def test_a_block_is_thought_to_its_end_with_a_good_will() -> None:
    """8 of 32 rows in a pass: the other 24 at 16 a pass, and a commit."""
    step = projected(rows=32, resolved=8, passes=1, milliseconds=10.0)
    assert step == Step(32, 3.5, 35.0)
    assert projected(rows=32, resolved=32, passes=4, milliseconds=40.0) == Step(32, 5, 50.0)
