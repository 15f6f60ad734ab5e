"""Settings: defaults from the checkpoint, where values come from, what is refused."""

import subprocess
import sys

import pytest

from clover_local.config import GenerationConfig, ModelConfig, parse_generation_config
from clover_local.decoding.settings import Place, ResolvedSettings, is_asked, is_given, resolve
from clover_local.errors import SettingsError


def resolved(config: ModelConfig, values: dict[str, object], **flags: object) -> ResolvedSettings:
    return resolve(config, parse_generation_config(values, config, "the file"), flags)


def test_checkpoint_gives_the_response_controls(golden_config: ModelConfig) -> None:
    made = resolved(
        golden_config,
        {
            "presence_penalty": 0.5,
            "dllm_length_penalty": 6.0,
            "dllm_length_penalty_start": 40,
            "dllm_think_end_token_id": 505,
            "suppress_tokens": [285, 295],
            "stop_token_ids": [74],
        },
        suppress=[7],
        temperature=1,
    )
    settings, sources = made.settings, made.sources
    assert (settings.presence_penalty, settings.length_penalty) == (0.5, 6.0)
    assert (settings.length_penalty_start, settings.length_penalty_window) == (40, 8192)
    assert settings.stop_ids == (74, 506, 507)
    assert settings.banned_ids == (7, 285, 295, 510)
    assert settings.temperature == 1.0 and isinstance(settings.temperature, float)
    assert sources["length_penalty"] == "generation_config.json"
    assert sources["length_penalty_window"] == "default"
    assert sources["threshold"] == "config.json"
    assert sources["temperature"] == "flag"


def test_flags_win_over_the_checkpoint_and_none_means_not_given(golden_config: ModelConfig) -> None:
    made = resolved(
        golden_config, {"repetition_penalty": 1.1}, repetition_penalty=1.0, top_k=None, mode="ar"
    )
    assert made.settings.repetition_penalty == 1.0
    assert made.sources["repetition_penalty"] == "flag"
    assert made.sources["top_k"] == "default"
    assert made.settings.mode == "ar"


def test_set_parses_text_and_remembers_where_it_came_from(golden_config: ModelConfig) -> None:
    made = resolved(golden_config, {})
    made = made.with_value("--max-new-tokens", " 33 ").with_value("suppress", "4, 5 6")
    made = made.with_value("top_p", "0.25")
    assert (made.settings.max_new_tokens, made.settings.suppress) == (33, (4, 5, 6))
    assert ("top_p", 0.25, "/set") in made.rows()
    assert made.with_value("suppress", "none").settings.suppress == ()


def test_a_place_is_the_models_or_a_users_and_of_these_for_this_run_or_for_all() -> None:
    assert not any(map(is_given, (Place.DEFAULT, Place.CONFIG, Place.GENERATION)))
    for general in ("/home/me/config.toml", "CLOVER_SEED", "session maths"):
        assert is_given(general) and not is_asked(general)
    for asked in (Place.FLAG, Place.ARGUMENT, Place.SET, Place.REGEN, Place.THINK, "/set"):
        assert is_given(asked) and is_asked(asked)


BAD = [
    ("mode", "drafts", "denoise, ar, draft"),
    ("draft_width", "12", "1, 2, 4, 8, 16, 32"),
    ("auto", "draft,ddraft", "modes such as"),
    ("auto", "auto", "modes such as"),
    ("accept", "all", "typical, exact"),
    ("accept_ratio", "1.1", "from 0 to 1"),
    ("accept_delta", "-1", "of 0 or more"),
    ("sampler", "luck", "threshold, factor"),
    ("max_new_tokens", "0", "1 or more"),
    ("max_new_tokens", "12.5", "whole number"),
    ("threshold", "1.5", "from 0 to 1"),
    ("threshold", "nan", "from 0 to 1"),
    ("temperature", "-0.1", "of 0 \\(greedy\\)"),
    ("temperature", "inf", "of 0 \\(greedy\\)"),
    ("temperature", "1e39", "at most 1000000"),
    ("length_penalty", "1e308", "from -1000000 to 1000000"),
    ("think_end_bias", "-1e39", "from -1000000 to 1000000"),
    ("length_penalty_start", "-" + "9" * 400, "to 2147483647"),
    ("repetition_penalty", "1e-320", "from 1e-06"),
    ("top_p", "0", "above 0"),
    ("top_k", "-1", "0 or more"),
    ("seed", str(2**64), "at most"),
    ("repetition_penalty", "0", "from 1e-06"),
    ("length_penalty_window", "0", "1 or more"),
    ("presence_penalty", "much", "a number"),
    ("suppress", "4,x", "token ids"),
    ("sampler_finish_gap", "perhaps", "on or off"),
    ("sampler_steps", "0", "1 or more"),
    ("sampler_factor", "nan", "of 0 or more, at most 1000000"),
    ("dry_breakers", "512", "end at 511"),
    ("loop_guard", "on", "off, raise, retry, stop"),
    ("suppress", "512", "end at 511"),
]


@pytest.mark.parametrize("key, text, says", BAD, ids=[f"{key}={text}" for key, text, _ in BAD])
def test_value_out_of_range_is_refused_with_what_is_expected(
    golden_config: ModelConfig, key: str, text: str, says: str
) -> None:
    with pytest.raises(SettingsError, match=says):
        resolved(golden_config, {}).with_value(key, text)


def test_a_switch_is_set_by_words_and_gamma_is_the_rules_own(golden_config: ModelConfig) -> None:
    made = resolved(golden_config, {}).with_value("eos_order", "on").with_value("sampler", "credit")
    assert made.settings.eos_order is True and made.settings.gamma == 0.2
    assert made.with_value("sampler", "entropy_bound").settings.gamma == 0.1
    assert made.with_value("sampler_gamma", "0.7").settings.gamma == 0.7


def test_more_rows_at_least_than_at_most_are_refused(golden_config: ModelConfig) -> None:
    with pytest.raises(SettingsError, match="sampler_min_per_pass is 3 and sampler_max_per_pass 2"):
        resolved(golden_config, {}, sampler_min_per_pass=3, sampler_max_per_pass=2)


def test_flag_of_a_wrong_type_is_refused(golden_config: ModelConfig) -> None:
    with pytest.raises(SettingsError, match="--top-k is True"):
        resolved(golden_config, {}, top_k=True)


def test_unknown_key_names_the_nearest(golden_config: ModelConfig) -> None:
    with pytest.raises(SettingsError, match="did you mean temperature"):
        resolved(golden_config, {}).with_value("temprature", "1")
    with pytest.raises(SettingsError, match="known are mode, "):
        resolved(golden_config, {}).with_value("zzz", "1")


def test_bias_that_this_model_cannot_obey_is_refused(golden_config: ModelConfig) -> None:
    with pytest.raises(SettingsError, match="dllm_think_end_token_id"):
        resolved(golden_config, {}, think_end_bias=2.0)
    without_stops = resolve(golden_config, GenerationConfig(), {})
    with pytest.raises(SettingsError, match="stop id"):
        without_stops.with_value("length_penalty", "1")
    assert without_stops.with_value("length_penalty", "0").settings.length_penalty == 0


def test_modes_of_auto_are_a_list_without_repeats(golden_config: ModelConfig) -> None:
    made = resolved(golden_config, {}).with_value("auto", "ar, draft ar")
    assert made.settings.auto == ("ar", "draft")
    assert made.settings.running_modes == ("denoise",)
    assert made.with_value("mode", "auto").settings.running_modes == ("ar", "draft")


def test_settings_need_no_torch() -> None:
    code = "import sys, clover_local.decoding.settings; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
