"""Which flags do nothing together."""

from dataclasses import replace
from typing import Any

import pytest

from clover_local.cli import effects
from clover_local.decoding.keys import KEYS, SAMPLERS
from clover_local.decoding.settings import Settings
from clover_local.errors import SettingsError

SETTINGS = Settings(mask_token_id=9, vocab_size=10)


@pytest.mark.parametrize(
    ("given", "changes", "idle"),
    [
        (["threshold", "sampler"], {"mode": "ar"}, ["threshold", "sampler"]),
        (["threshold"], {}, []),
        (["top_k", "top_p", "seed"], {}, ["top_k", "top_p", "seed"]),
        (["top_k", "top_p", "seed"], {"temperature": 0.5}, []),
        (["length_penalty_start"], {}, ["length_penalty_start"]),
        (["length_penalty_window"], {"length_penalty": 1.0}, []),
        (["think_end_start", "think_end_window"], {}, ["think_end_start", "think_end_window"]),
        (["think_end_start"], {"think_end_bias": 2.0}, []),
        (["threshold", "sampler"], {"mode": "draft"}, ["threshold", "sampler"]),
        (["auto"], {}, ["auto"]),
        (["auto", "threshold", "draft_width"], {"mode": "auto"}, []),
        (
            ["threshold", "draft_width"],
            {"mode": "auto", "auto": ("draft", "ar")},
            ["threshold"],
        ),
        (
            ["eos_order", "no_repeat_ngram", "sampler_steps", "loop_guard"],
            {"mode": "auto", "auto": ("draft", "ar")},
            ["eos_order", "no_repeat_ngram", "sampler_steps"],
        ),
        (["eos_order", "sampler_steps"], {"mode": "auto"}, ["sampler_steps"]),
        (["draft_width", "accept"], {}, ["draft_width", "accept"]),
        (["draft_width", "accept_ratio"], {"mode": "draft"}, []),
        (
            ["draft_width", "accept_delta"],
            {"mode": "draft", "accept": "exact"},
            ["accept_delta"],
        ),
        (["mode", "temperature", "suppress"], {}, []),
        (["threshold", "sampler_factor"], {"sampler": "factor"}, ["threshold"]),
        (["sampler_steps", "sampler_gamma"], {"sampler": "credit"}, ["sampler_steps"]),
        (["sampler_factor", "sampler_min_per_pass"], {}, ["sampler_factor"]),
        (["sampler_finish_gap", "eos_order"], {"mode": "ar"}, ["eos_order", "sampler_finish_gap"]),
        (["dry_base", "dry_allowed"], {}, ["dry_base", "dry_allowed"]),
        (["dry_base"], {"dry_multiplier": 1.0}, []),
    ],
)
def test_settings_without_effect_are_found(
    given: list[str], changes: dict[str, Any], idle: list[str]
) -> None:
    settings = replace(SETTINGS, **changes)
    assert sorted(name for name, _ in effects.without_effect(given, settings)) == sorted(idle)


def test_every_knob_belongs_to_a_rule_or_to_all() -> None:
    modifiers = {"sampler_min_per_pass", "sampler_max_per_pass", "sampler_finish_gap"}
    knobs = {key for key in KEYS if key.startswith("sampler_")}
    assert knobs - {*effects.RULE_KNOBS.split()} == modifiers
    assert set(effects.KNOBS_OF) == set(SAMPLERS)


def test_what_bypasses_the_template_idles_its_flags() -> None:
    findings = effects.without_template(["system", "think"], bypass="--raw", can_think=True)
    assert findings == [("system", "with --raw"), ("think", "with --raw")]


def test_a_template_without_the_switch_idles_think_only() -> None:
    findings = effects.without_template(["system", "think"], bypass=None, can_think=False)
    assert [name for name, _ in findings] == ["think"]
    assert effects.without_template(["system", "think"], bypass=None, can_think=True) == []


def test_findings_are_notes_or_with_strict_one_error(capsys: pytest.CaptureFixture[str]) -> None:
    findings = [("top_p", "at temperature 0"), ("seed", "at temperature 0")]
    effects.report(findings, strict=False)
    assert capsys.readouterr().err.count("has no effect") == 2
    with pytest.raises(SettingsError, match=r"--top-p .*--seed .*--strict"):
        effects.report(findings, strict=True)
    effects.report([], strict=True)
