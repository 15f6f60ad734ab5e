"""The pick on the device against the one on the host: whole runs, tables, interrupts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest
import torch

from clover_local.cache import SequenceState
from clover_local.config import ModelConfig
from clover_local.decoding.autoregressive import Autoregressive
from clover_local.decoding.controls import ResponseControls
from clover_local.decoding.denoise import Denoise
from clover_local.decoding.device_pick import KEPT_REPLAYS, DevicePicker
from clover_local.decoding.host_pick import HostPicker
from clover_local.decoding.on_device.inputs import Inputs, Room
from clover_local.decoding.pick import DeviceBlock, Picker, RowStatistics
from clover_local.decoding.run import Mode, Run
from clover_local.decoding.settings import Settings
from clover_local.decoding.speculation.draft import Draft
from clover_local.errors import CloverError
from tests.decoding.conftest import DEVICE, Noisy, noise

if TYPE_CHECKING:
    from tests.decoding.conftest import Scripted

MASK, STOP, PAD, VOCABULARY = 49, 48, 47, 50
MODES: dict[str, Mode] = {"denoise": Denoise(), "ar": Autoregressive(), "draft": Draft()}
BLOCK = 3
"""Rows: each takes the interpreter some milliseconds a pass."""


@pytest.fixture
def small(scripted: Scripted) -> Callable[..., Noisy]:
    config: ModelConfig = replace(scripted.config, block_size=BLOCK)

    def make(**given: Any) -> Noisy:
        return Noisy(config, **given)

    return make


def answer(model: Noisy, settings: Settings, picker: Picker, *, context: int = 40) -> Run:
    """A whole answer to a prompt of two tokens."""
    state = SequenceState(model.config, context=context, device=DEVICE, dtype=torch.float32)
    run = Run(model, state, settings, prompt_tokens=2, picker=picker)
    mode = MODES[settings.mode]
    run.commit_prompt([1, 2], logits=mode.starts_from_logits)
    while run.finish_reason is None:
        list(mode.block(run))
    return run


def choices(run: Run) -> list[tuple[int, int]]:
    return [(t.token, t.pass_number) for t in run.tokens]


CONTROLS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "repetition": {
        "max_new_tokens": 10,  # long enough to repeat
        "presence_penalty": 0.4,
        "frequency_penalty": 0.6,
        "repetition_penalty": 1.4,
        "suppress": (3, 4, 5, 17),
    },
    "length-and-thinking": {
        "max_new_tokens": 10,
        "length_penalty": 6.0,
        "length_penalty_start": 3,
        "length_penalty_window": 9,
        "think_end_token_id": 7,
        "think_end_bias": 6.0,
        "think_end_start": 0,
        "think_end_window": 2,
        "threshold": 0.999,  # one row ends the thinking, and the others go without the bias
    },
    "drawn": {"temperature": 0.9, "top_k": 9, "top_p": 0.9, "seed": (1 << 63) + 9},
    "drawn-from-everything": {"temperature": 1.4, "presence_penalty": 1.0, "threshold": 0.0},
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", CONTROLS)
def test_same_text_whoever_picks(
    case: str, mode: str, small: Callable[..., Noisy], scripted: Scripted
) -> None:
    given = {"mode": mode, "max_new_tokens": 5, "threshold": 0.25, **CONTROLS[case]}
    settings = scripted.settings(**given)
    expected = answer(small(), settings, HostPicker())
    got = answer(small(), settings, DevicePicker(DEVICE))
    assert choices(got) == choices(expected)
    assert [t.confidence for t in got.tokens] == pytest.approx(
        [t.confidence for t in expected.tokens], abs=1e-6
    )
    assert got.finish_reason == expected.finish_reason


RULES: dict[str, dict[str, Any]] = {
    "factor": {"sampler_factor": 2.0},
    "entropy_bound": {"sampler_gamma": 1.5},
    "margin": {"sampler_margin": 0.1, "temperature": 0.8},
    "fixed_steps": {"sampler_steps": 2},
    "sequential": {"presence_penalty": 1.0},
    "klass": {"sampler_threshold": 0.1, "sampler_kl": 9.0, "sampler_history": 1},
    "credit": {"threshold": 0.3, "temperature": 0.7},
    "hierarchy": {"sampler_low": 0.1, "sampler_max_per_pass": 2},
    "threshold": {"sampler_min_per_pass": 2, "sampler_finish_gap": True},
}
OURS: dict[str, dict[str, Any]] = {
    "least-length": {"min_new_tokens": 5, "suppress": (), "length_penalty": 90.0},
    "in-block": {"in_block_repetition": True, "no_repeat_ngram": 2, "threshold": 0.0},
    "dry": {"dry_multiplier": 4.0, "dry_allowed": 1, "threshold": 0.1},
    "eos-order": {"eos_order": True, "suppress": (), "length_penalty": 4.0, "threshold": 0.1},
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", OURS)
def test_same_text_under_controls_of_ours_whoever_picks(
    case: str, mode: str, small: Callable[..., Noisy], scripted: Scripted
) -> None:
    given = {"mode": mode, "max_new_tokens": 2 * BLOCK, "suppress": (STOP, PAD)}
    ramp = {"length_penalty_start": 0, "length_penalty_window": 1}
    settings = scripted.settings(**{**given, **ramp, **OURS[case]})
    expected = choices(answer(small(), settings, HostPicker()))
    assert choices(answer(small(), settings, DevicePicker(DEVICE))) == expected


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_no_two_neighbours_are_equal_whoever_picks(
    temperature: float, small: Callable[..., Noisy], scripted: Scripted
) -> None:
    """The model wants 5 in every row and pass; the device has to learn of tokens in its stead."""
    given = {"max_new_tokens": 2 * BLOCK + 1, "suppress": (STOP, PAD), "temperature": temperature}
    settings = scripted.settings(**given, in_block_repetition=True)
    expected = choices(answer(small(wanted=5), settings, HostPicker()))
    got = choices(answer(small(wanted=5, keeps_block=True), settings, DevicePicker(DEVICE)))
    assert got == expected
    tokens = [token for token, _ in got]
    assert tokens.count(5) >= BLOCK and not any(a == b for a, b in pairwise(tokens))


@pytest.mark.parametrize("sampler", RULES)
def test_same_text_by_every_rule_whoever_picks(
    sampler: str, small: Callable[..., Noisy], scripted: Scripted
) -> None:
    given = {"max_new_tokens": 2 * BLOCK, "suppress": (STOP, PAD), "sampler": sampler}
    settings = scripted.settings(**{**given, **RULES[sampler]})
    expected = choices(answer(small(), settings, HostPicker()))
    assert choices(answer(small(keeps_block=True), settings, DevicePicker(DEVICE))) == expected


ROUNDS: dict[str, dict[str, Any]] = {
    "typical": {"accept_ratio": 0.2},
    "exact": {"accept": "exact"},
    "warm": {"temperature": 0.8, "accept_ratio": 0.2},
    "length": {"length_penalty": 4.0, "length_penalty_start": 3, "length_penalty_window": 4},
    "thinking": {
        "think_end_token_id": 7,
        "think_end_bias": 3.0,
        "think_end_start": 0,
        "think_end_window": 2,
    },
    "least-length": {"min_new_tokens": 5, "accept_ratio": 0.2},
    "penalties": {"presence_penalty": 0.4, "accept_ratio": 0.2},
    "dry": {"dry_multiplier": 4.0, "dry_allowed": 1, "accept_ratio": 0.2},
}


@pytest.mark.parametrize("case", ROUNDS)
def test_drafts_are_proposed_and_judged_the_same_whoever_picks(
    case: str, scripted: Scripted
) -> None:
    """Statistics of all rows too. Drafts are the rows' own tokens, likely ones and a bad one."""
    settings = scripted.settings(mode="draft", suppress=(3, 4), **ROUNDS[case])
    controls, device = ResponseControls(settings), DevicePicker(DEVICE)
    controls.add([9, 11, 9])
    width, accepted = 5, set[int]()
    block = [9, *[MASK] * (width - 1)]
    for seed in range(4):
        generator = torch.Generator().manual_seed(seed)
        logits = (torch.randn(width, VOCABULARY, generator=generator) * 2).to(DEVICE)
        logits[:, [MASK, STOP]] += 6.0
        kept = logits.clone()
        assert_same(
            device.propose(logits, controls, block=block),
            HostPicker().propose(logits, controls, block=block),
        )
        drafts = HostPicker().judge(logits, controls, drafts=[7] * (width - 1)).statistics.token
        for tokens in (logits.argsort(-1)[:-1, -4].tolist(), [7, 20, STOP, 8], [*drafts, 5, 5, 5]):
            proposed = [int(token) for token in tokens][: width - 1]
            ours = device.judge(logits, controls, drafts=proposed)
            theirs = HostPicker().judge(logits, controls, drafts=proposed)
            assert (ours.accepted, ours.boundary) == (theirs.accepted, theirs.boundary)
            assert_same(ours.statistics, theirs.statistics)
            accepted.add(ours.accepted)
        assert torch.equal(logits, kept)
    assert len(accepted) > 1


def assert_same(got: RowStatistics, expected: RowStatistics) -> None:
    assert torch.equal(got.token, expected.token)
    assert torch.equal(got.top_ids[:, 0], expected.top_ids[:, 0])
    for name in ("confidence", "raw_confidence", "entropy", "top_probabilities"):
        ours, theirs = getattr(got, name), getattr(expected, name)
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_a_round_is_judged_with_one_wait_and_one_upload(
    scripted: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    controls, picker = ResponseControls(scripted.settings()), DevicePicker(DEVICE)
    uploads = count_calls(monkeypatch, Inputs, "send")
    logits = torch.randn(3, VOCABULARY, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    for width in (3, 1, 3):
        picker.judge(logits[:width], controls, drafts=[5] * (width - 1))
    assert len(uploads) == 3


@pytest.mark.parametrize("row", [0, 2])
def test_a_round_of_no_numbers_is_refused_by_position(row: int, scripted: Scripted) -> None:
    controls, picker = ResponseControls(scripted.settings()), DevicePicker(DEVICE)
    controls.add([9])
    logits = torch.zeros(3, VOCABULARY, device=DEVICE)
    logits[row] = torch.nan
    for each in (picker, HostPicker()):
        with pytest.raises(CloverError, match=f"at response position {row + 2} are no numbers"):
            each.judge(logits, controls, drafts=[5, 6])
    with pytest.raises(ValueError, match="1 drafts for 3 rows, not 2"):
        picker.judge(logits, controls, drafts=[5])


def test_one_picker_serves_a_rule_of_the_host_and_one_of_the_device(
    small: Callable[..., Noisy], scripted: Scripted
) -> None:
    picker, model = DevicePicker(DEVICE), small(keeps_block=True)
    for sampler in ("threshold", "factor", "threshold"):
        settings = scripted.settings(max_new_tokens=BLOCK, sampler=sampler, threshold=0.3)
        expected = choices(answer(small(), settings, HostPicker()))
        assert choices(answer(model, settings, picker)) == expected


def test_one_picker_serves_runs_with_other_settings(
    small: Callable[..., Noisy], scripted: Scripted
) -> None:
    picker = DevicePicker(DEVICE, room=Room(rows=1, banned=1, stop_ids=1, seen=1))
    for case in ("repetition", "drawn", "greedy"):
        given: dict[str, Any] = {"max_new_tokens": 4, **CONTROLS[case], "threshold": 0.1}
        settings = scripted.settings(**given)
        got = answer(small(), settings, picker)
        assert got.tokens == answer(small(), settings, DevicePicker(DEVICE)).tokens


def test_block_on_the_device_is_sent_once_and_kept_up_to_date(
    small: Callable[..., Noisy], scripted: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two blocks and one that the context cuts: the model and the picker send each once."""
    uploads = count_calls(monkeypatch, Inputs, "send")
    model, settings = small(keeps_block=True), scripted.settings(suppress=(STOP, PAD))
    run = answer(model, settings, DevicePicker(DEVICE), context=2 + 2 * BLOCK + 2)
    assert run.finish_reason == "context"
    assert model.previews > 3
    assert (model.sent, len(uploads)) == (3, 3)
    assert run.tokens == answer(small(), settings, DevicePicker(DEVICE), context=10).tokens


def count_calls(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> list[None]:
    calls, method = list[None](), getattr(owner, name)

    def counted(*arguments: Any) -> Any:
        calls.append(None)
        return method(*arguments)

    monkeypatch.setattr(owner, name, counted)
    return calls


def test_interrupt_behind_an_accept_leaves_nothing_wrong(
    small: Callable[..., Noisy], scripted: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device has accepted, the host has not heard of it: the next run starts from nothing."""
    model, picker = small(keeps_block=True), DevicePicker(DEVICE)
    settings = scripted.settings(max_new_tokens=BLOCK, think_end_token_id=7, think_end_bias=9.0)
    waits = DevicePicker._wait

    def interrupted(self: DevicePicker) -> None:
        if self._in_flight:
            raise KeyboardInterrupt
        waits(self)

    monkeypatch.setattr(DevicePicker, "_wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        answer(model, settings, picker)
    assert model.block is not None and model.block.host == []
    monkeypatch.setattr(DevicePicker, "_wait", waits)
    again = answer(model, settings, picker)
    assert again.tokens == answer(small(), settings, DevicePicker(DEVICE)).tokens


def test_interrupt_between_passes(small: Callable[..., Noisy], scripted: Scripted) -> None:
    def interrupt(previews: int) -> None:
        if previews == 2:
            raise KeyboardInterrupt

    settings, picker = scripted.settings(max_new_tokens=BLOCK), DevicePicker(DEVICE)
    model = small(keeps_block=True, before_preview=interrupt)
    with pytest.raises(KeyboardInterrupt):
        answer(model, settings, picker)
    model.before_preview = lambda previews: None
    again = answer(model, settings, picker)
    assert again.tokens == answer(small(), settings, DevicePicker(DEVICE)).tokens


def history(settings: Settings, tokens: Sequence[int] = (4, 9, 4, 30)) -> ResponseControls:
    controls = ResponseControls(settings)
    controls.add(tokens)
    return controls


def check_equal(got: RowStatistics, expected: RowStatistics) -> None:
    assert got.token.tolist() == expected.token.tolist()
    assert got.top_ids.tolist() == expected.top_ids.tolist()
    for name in ("confidence", "raw_confidence", "entropy", "top_probabilities"):
        torch.testing.assert_close(getattr(got, name), getattr(expected, name))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_statistics_of_some_rows(dtype: torch.dtype, scripted: Scripted) -> None:
    controls = history(scripted.settings(presence_penalty=1.0))
    logits = noise(range(5), salt=1).to(dtype)
    got = DevicePicker(DEVICE).pick(logits, controls, rows=[1, 4])
    check_equal(got, HostPicker().pick(logits, controls, rows=[1, 4]))


@pytest.mark.parametrize("picker", [HostPicker(), DevicePicker(DEVICE)], ids=["host", "device"])
def test_rows_that_are_picked_one_by_one_are_those_of_one_batch(
    picker: Picker, scripted: Scripted
) -> None:
    """A row of its own stands at the same position behind a longer answer."""
    settings = scripted.settings(temperature=1.2, top_k=20, top_p=0.9, seed=2**40)
    logits = noise(range(6), salt=7)
    together = picker.pick(logits, history(settings, ()), rows=range(6))
    for row in range(6):
        alone = picker.pick(logits[row : row + 1], history(settings, [9] * row), rows=[0])
        for name in ("token", "confidence", "entropy", "top_ids", "top_probabilities"):
            assert torch.equal(getattr(alone, name), getattr(together, name)[[row]])
    assert len(set(together.token.tolist())) > 3


@pytest.mark.parametrize("threshold", [0.0, 0.2, 0.99])
def test_accepted_rows_and_reasons(threshold: float, scripted: Scripted) -> None:
    controls = history(scripted.settings(threshold=threshold))
    logits = noise(range(5), salt=2)
    logits[1] = torch.nan  # of a row that is fixed
    given: dict[str, Any] = {"block": [MASK, 5, MASK, MASK, 6], "rows": [0, 2, 3]}
    expected, by_rule = HostPicker().pick_block(
        logits, controls, **given, on_device=None, pass_number=2
    )
    got, accepted = DevicePicker(DEVICE).pick_block(
        logits, controls, **given, on_device=None, pass_number=2
    )
    check_equal(got, expected)
    assert accepted.accept.tolist() == by_rule.accept.tolist()
    assert accepted.reasons == by_rule.reasons
    assert given["block"] == [MASK, 5, MASK, MASK, 6]


@pytest.mark.parametrize("broken", [torch.nan, torch.inf], ids=str)
def test_logits_that_are_no_numbers_are_refused_alike(broken: float, scripted: Scripted) -> None:
    controls, logits = history(scripted.settings()), noise(range(3), salt=3)
    logits[2, 8] = broken
    block = DeviceBlock(torch.tensor([MASK, 5, MASK], device=DEVICE), [MASK, 5, MASK])
    given: dict[str, Any] = {"block": [MASK, 5, MASK], "rows": [0, 2], "pass_number": 0}
    pickers: tuple[Picker, ...] = (HostPicker(), DevicePicker(DEVICE))
    sentences = set()
    for picker in pickers:
        with pytest.raises(CloverError) as caught:
            picker.pick(logits, controls, rows=[1, 2])
        sentences.add(str(caught.value))
        with pytest.raises(CloverError) as caught:
            picker.pick_block(logits, controls, **given, on_device=block)
        sentences.add(str(caught.value))
    (sentence,) = sentences
    assert "response position 7" in sentence
    assert block.ids.tolist() == [MASK, 5, MASK]


def test_suppressing_the_whole_vocabulary_is_refused(scripted: Scripted) -> None:
    controls = history(scripted.settings(suppress=tuple(range(VOCABULARY))))
    with pytest.raises(CloverError, match=r"position 5 .*--suppress"):
        DevicePicker(DEVICE).pick(noise([0], salt=0), controls, rows=[0])


def test_many_distinct_tokens_outgrow_the_room(scripted: Scripted) -> None:
    picker = DevicePicker(DEVICE, room=Room(seen=2))
    controls = history(scripted.settings(frequency_penalty=0.5), [])
    for token in range(9):
        logits = noise([token], salt=4)
        controls.add([token, token])
        check_equal(
            picker.pick(logits, controls, rows=[0]), HostPicker().pick(logits, controls, rows=[0])
        )


def test_logits_at_ever_new_addresses_keep_few_captures(scripted: Scripted) -> None:
    picker, controls = DevicePicker(DEVICE), history(scripted.settings())
    kept = [noise([0], salt=salt) for salt in range(KEPT_REPLAYS + 3)]
    for logits in kept:
        picker.pick(logits, controls, rows=[0])
    assert len(picker._replays) == KEPT_REPLAYS


def test_block_of_the_device_has_to_be_the_hosts(scripted: Scripted) -> None:
    block = DeviceBlock(torch.tensor([MASK, MASK], device=DEVICE), [])
    with pytest.raises(ValueError, match=r"the device has the block \[\], the host \[49, 49\]"):
        DevicePicker(DEVICE).pick_block(
            noise([0, 1], salt=0),
            history(scripted.settings()),
            block=[MASK, MASK],
            rows=[0, 1],
            on_device=block,
            pass_number=0,
        )
