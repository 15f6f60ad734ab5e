"""The choice among modes, from numbers alone."""

import itertools

import pytest

from clover_local.decoding.auto.chooser import Choice, Chooser, Stretch, projected
from clover_local.decoding.auto.foresight import Forwards

Modes = dict[str, tuple[float, float, float, float, float]]
"""By mode: tokens a stretch, previews, commits, milliseconds of a preview and of a commit."""

PROSE: Modes = {
    "denoise": (32, 29, 1, 7.4, 2.9),
    "draft": (17, 5, 5, 7.4, 4.4),
    "ar": (32, 0, 32, 0, 2.9),
}
CODE: Modes = {**PROSE, "denoise": (32, 12, 1, 7.4, 2.9), "draft": (50, 5, 5, 7.4, 4.4)}
MATHS: Modes = {**PROSE, "denoise": (32, 2, 1, 7.4, 2.9)}
MODES = ("denoise", "draft", "ar")


def stretch(modes: Modes, mode: str) -> Stretch:
    """What a mode comes to."""
    tokens, previews, commits, preview_ms, commit_ms = modes[mode]
    forwards = Forwards(tokens, previews, commits)
    return Stretch(forwards, previews * preview_ms, commits * commit_ms)


def run(
    chooser: Chooser, modes: Modes, *, stretches: int, with_foresight: bool = True
) -> list[Choice]:
    """Choices where every stretch of a mode comes to the same."""
    made = []
    for _ in range(stretches):
        choice = chooser.choose()
        own = stretch(modes, choice.mode)
        foreseen: dict[str, Forwards] = {
            mode: Forwards(*modes[mode][:3])
            for mode in ("denoise", "draft")
            if mode in modes and mode != choice.mode != "ar" and with_foresight
        }
        chooser.record(choice, own, foreseen)
        made.append(choice)
    return made


def speed(modes: Modes, mode: str) -> float:
    """Tokens a millisecond."""
    own = stretch(modes, mode)
    return own.forwards.tokens / own.milliseconds


@pytest.mark.parametrize("with_foresight", [True, False], ids=["foresight", "blind"])
@pytest.mark.parametrize(
    ("modes", "best"),
    [(PROSE, "ar"), (CODE, "draft"), (MATHS, "denoise")],
    ids=["prose", "code", "maths"],
)
def test_the_fastest_mode_runs_and_the_others_are_only_probed(
    modes: Modes, best: str, with_foresight: bool
) -> None:
    chooser = Chooser(MODES)
    choices = run(chooser, modes, stretches=1000, with_foresight=with_foresight)
    assert {choice.mode for choice in choices[:200]} == set(MODES)
    assert {choice.mode for choice in choices[30:] if not choice.is_probe} == {best}
    spent = sum(stretch(modes, choice.mode).milliseconds for choice in choices)
    tokens = sum(modes[choice.mode][0] for choice in choices)
    assert tokens / spent > 0.93 * speed(modes, best)
    use = chooser.use()
    assert use.mode == use.rates[0].mode == best
    assert use.line.startswith(f"{best}: ")
    assert all(mode in use.line for mode in MODES)


@pytest.mark.parametrize(
    ("before", "after", "mode"),
    [(PROSE, CODE, "draft"), (CODE, MATHS, "denoise"), (MATHS, PROSE, "ar")],
    ids=["prose to code", "code to maths", "maths to prose"],
)
def test_a_text_that_changes_changes_the_mode(before: Modes, after: Modes, mode: str) -> None:
    chooser = Chooser(MODES)
    run(chooser, before, stretches=100)
    choices = run(chooser, after, stretches=300)
    assert chooser.use().mode == mode
    assert [choice.mode for choice in choices[-20:]].count(mode) >= 17


def test_a_text_that_changes_is_noticed_at_once_where_foresight_sees_it() -> None:
    chooser = Chooser(MODES)
    run(chooser, CODE, stretches=20)
    choices = run(chooser, MATHS, stretches=30)
    assert [choice.mode for choice in choices[-5:]] == ["denoise"] * 5


def test_a_machine_that_changes_changes_the_mode() -> None:
    chooser = Chooser(MODES)
    run(chooser, CODE, stretches=50)
    slow: Modes = {**CODE, "draft": (50, 5, 5, 7.4, 60.0)}
    run(chooser, slow, stretches=40)
    assert chooser.use().mode in ("denoise", "ar")
    run(chooser, CODE, stretches=400)
    assert chooser.use().mode == "draft"


def test_probes_of_a_mode_that_loses_become_rare() -> None:
    chooser = Chooser(MODES)
    choices = run(chooser, MATHS, stretches=600)
    probes = [n for n, choice in enumerate(choices) if choice.is_probe and choice.mode == "draft"]
    gaps = [later - earlier for earlier, later in itertools.pairwise(probes)]
    assert gaps == sorted(gaps)
    assert max(gaps) <= 130
    assert len(probes) >= 4


def test_one_forward_of_ar_comes_first_and_a_hopeless_mode_is_put_off() -> None:
    slow: Modes = {
        "denoise": (32, 20, 1, 50.0, 5.0),
        "draft": (8, 5, 5, 50.0, 5.0),
        "ar": (1, 0, 1, 0, 1.0),
    }
    chooser = Chooser(MODES)
    choices = run(chooser, slow, stretches=60)
    assert [choice.mode for choice in choices[:2]] == ["ar", "denoise"]
    assert {choice.mode for choice in choices[2:]} == {"ar"}


def test_a_first_stretch_that_pays_for_what_is_made_once_is_forgiven() -> None:
    chooser = Chooser(["draft", "ar"])
    for milliseconds in (5000.0, 30.0):
        own = Stretch(Forwards(50, 5, 5), 5 * milliseconds, 30.0)
        chooser.record(Choice("draft", True, ""), own)
    (rate,) = chooser.use().rates
    assert rate.ms_per_forward == (30.0 + 6.0) / 2


def test_after_a_cold_start_every_mode_is_measured_twice() -> None:
    chooser = Chooser(MODES)
    seen: list[str] = []
    for _ in range(12):
        choice = chooser.choose()
        own = stretch(CODE, choice.mode)
        cold = 1 if choice.mode in seen else 20
        chooser.record(choice, Stretch(own.forwards, cold * own.preview_ms, cold * own.commit_ms))
        seen.append(choice.mode)
    assert {mode: seen.count(mode) >= 2 for mode in MODES} == dict.fromkeys(MODES, True)
    assert chooser.use().mode == "draft"


def test_modes_that_are_as_fast_do_not_take_turns() -> None:
    modes: Modes = {"denoise": (32, 3, 1, 7.0, 7.0), "draft": (33, 2, 2, 7.0, 7.0)}
    chooser = Chooser(["denoise", "draft"])
    choices = run(chooser, modes, stretches=200)
    own = [choice.mode for choice in choices if not choice.is_probe]
    assert set(own) == {"denoise"}


def test_one_mode_alone_is_never_probed_and_none_is_refused() -> None:
    chooser = Chooser(["draft"])
    assert {choice.is_probe for choice in run(chooser, CODE, stretches=40)} == {False}
    with pytest.raises(ValueError, match="0 modes"):
        Chooser([])


def test_a_stretch_without_forwards_says_nothing() -> None:
    chooser = Chooser(MODES)
    chooser.record(chooser.choose(), Stretch(Forwards(1, 0, 0)))
    assert chooser.use().rates == ()


def test_a_block_that_was_left_counts_as_what_it_would_have_come_to() -> None:
    chooser = Chooser(["ar", "denoise"])
    chooser.record(Choice("ar", True, ""), Stretch(Forwards(1, 0, 1), 0.0, 1.0))
    left = Stretch(Forwards(0, 1, 0), 10.0, 0.0)
    chooser.record(Choice("denoise", True, ""), left, {"denoise": Forwards(32, 9, 1)})
    chooser.record(Choice("denoise", True, ""), Stretch(Forwards(32, 9, 1), 90.0, 2.0))
    rate = next(rate for rate in chooser.use().rates if rate.mode == "denoise")
    assert (rate.tokens_per_forward, rate.ms_per_forward) == (3.2, 9.2)


def test_a_mode_whose_block_was_left_gives_way_without_a_commit_of_its_own() -> None:
    chooser = Chooser(MODES)
    chooser.record(chooser.choose(), Stretch(Forwards(1, 0, 1), 0.0, 8.0))
    left = Stretch(Forwards(0, 1, 0), 35.0, 0.0)
    chooser.record(chooser.choose(), left, {"denoise": Forwards(32, 20, 1)})
    assert chooser.choose(besides="denoise").mode == "ar"
    assert chooser.use().mode == "ar"
    assert [rate.mode for rate in chooser.use().rates] == ["ar", "denoise"]


def test_only_what_is_known_is_sooner_done() -> None:
    chooser = Chooser(MODES)
    assert chooser.milliseconds_besides("denoise", tokens=32) == float("inf")
    chooser.record(chooser.choose(), Stretch(Forwards(1, 0, 1), 0.0, 8.0))
    assert chooser.milliseconds_besides("denoise", tokens=32) == 256.0
    assert chooser.milliseconds_besides("ar", tokens=32) == float("inf")


def test_a_block_is_thought_to_its_end_with_a_good_will() -> None:
    """8 of 32 rows in a pass: the other 24 at 16 a pass, and a commit."""
    assert projected(rows=32, resolved=8, passes=1) == Forwards(32, 2.5, 1)
    assert projected(rows=32, resolved=32, passes=4) == Forwards(32, 4, 1)


def test_a_few_tokens_of_draft_take_a_round() -> None:
    chooser = Chooser(["draft", "denoise"])
    chooser.record(chooser.choose(), stretch(CODE, "draft"))
    assert chooser.milliseconds_besides("denoise", tokens=1) == pytest.approx(7.4 + 4.4)
    assert chooser.milliseconds_besides("denoise", tokens=50) == pytest.approx(5 * (7.4 + 4.4))
