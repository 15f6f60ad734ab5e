"""/set, /show and /mode, on the golden model."""

import pytest

from clover_local.cli.commands import execute
from clover_local.cli.setting import keys_and_values
from clover_local.cli.talk import ChatState
from clover_local.decoding.keys import KEYS
from clover_local.errors import SettingsError


def say(line: str, chat: ChatState, capsys: pytest.CaptureFixture[str]) -> str:
    """What a command prints, stdout and stderr."""
    execute(line, chat)
    return "".join(capsys.readouterr())


@pytest.mark.parametrize(
    "line", ["/set threshold 0.5", "/set\tthreshold = 0.5", "/set  --threshold  0.5 "]
)
def test_set_changes_the_next_run(
    chat: ChatState, capsys: pytest.CaptureFixture[str], line: str
) -> None:
    assert say(line, chat, capsys) == "threshold = 0.5\n"
    assert chat.conversation.generator.settings.threshold == 0.5
    shown = say("/show", chat, capsys).splitlines()
    assert any(row.split() == ["threshold", "0.5", "/set"] for row in shown)


def test_drawing_says_its_seed(chat: ChatState, capsys: pytest.CaptureFixture[str]) -> None:
    assert "seed 0" in say("/set temperature 0.7", chat, capsys)
    assert "seed" not in say("/set temperature 0", chat, capsys)


def test_set_says_when_a_key_has_no_effect(
    chat: ChatState, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "top_p has no effect at temperature 0" in say("/set top-p 0.5", chat, capsys)


def test_show_has_every_setting_with_its_source(
    chat: ChatState, capsys: pytest.CaptureFixture[str]
) -> None:
    chat.sources["device"] = "flag"
    rows = {row.split()[0]: row.split()[-1] for row in say("/show", chat, capsys).splitlines()}
    assert rows.keys() >= {*KEYS, "system", "think", "watch", "model", "context", "device", "dtype"}
    assert rows["max_new_tokens"] == "flag"
    assert rows["threshold"] == "config.json"
    assert rows["temperature"] == "default"
    assert rows["device"] == "flag"


def test_mode_is_a_setting(chat: ChatState, capsys: pytest.CaptureFixture[str]) -> None:
    assert say("/mode", chat, capsys) == "mode: denoise\n"
    say("/mode ar", chat, capsys)
    assert chat.conversation.generator.settings.mode == "ar"


def test_a_key_alone_says_its_value_its_source_and_what_it_takes(
    chat: ChatState, capsys: pytest.CaptureFixture[str]
) -> None:
    before = chat.resolved
    said = say("/set threshold", chat, capsys)
    assert "threshold = 0.95 (config.json)" in said
    assert "a number from 0 to 1" in said
    assert say("/show --threshold", chat, capsys) == said
    assert "context = " in say("/show context", chat, capsys)
    assert chat.resolved is before


def test_a_bound_beyond_any_use_is_named_only_where_it_is_passed(
    chat: ChatState, capsys: pytest.CaptureFixture[str]
) -> None:
    for key, takes in (
        ("think_end_start", "Takes a whole number; default"),
        ("length_penalty", "Takes a number; default"),
        ("seed", "Takes a whole number of 0 or more; default"),
        ("dry_allowed", "Takes a whole number of 1 or more; default"),
        ("temperature", "Takes a number of 0 (greedy) or more; default"),
        ("no_repeat_ngram", "Takes a whole number of 0 or more, at most 64; default"),
    ):
        assert takes in say(f"/set {key}", chat, capsys), key
    with pytest.raises(SettingsError, match="a whole number, from -2147483647 to 2147483647"):
        execute("/set think_end_start 3000000000", chat)
    with pytest.raises(SettingsError, match="0 or more, at most 18446744073709551615"):
        execute(f"/set seed {2**64}", chat)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("/set foo 3", "unknown setting 'foo': /show lists the keys"),
        ("/show foo", "unknown setting 'foo': /show lists the keys"),
        ("/set watch off", "/watch changes it"),
    ],
)
def test_a_key_that_is_none_is_answered_in_one_line(chat: ChatState, line: str, words: str) -> None:
    with pytest.raises(SettingsError, match=words) as caught:
        execute(line, chat)
    assert len(str(caught.value)) < 80


def test_set_alone_lists_what_was_changed(
    chat: ChatState, capsys: pytest.CaptureFixture[str]
) -> None:
    say("/set top_k 7", chat, capsys)
    rows = [row.split() for row in say("/set", chat, capsys).splitlines()]
    assert ["max_new_tokens", "40", "flag"] in rows
    assert ["top_k", "7", "/set"] in rows
    assert not any(row[0] == "threshold" for row in rows)


def test_default_gives_the_models_own_value_back(
    chat: ChatState, capsys: pytest.CaptureFixture[str]
) -> None:
    say("/set threshold 0.5", chat, capsys)
    assert say("/set threshold default", chat, capsys) == "threshold = 0.95\n"
    assert chat.resolved.sources["threshold"] == "config.json"
    assert chat.conversation.generator.settings.threshold == 0.95
    say("/set max_new_tokens default", chat, capsys)
    assert "every setting is the model's own" in say("/set", chat, capsys)


@pytest.mark.parametrize(
    ("typed", "values"),
    [
        ("mode a", ["mode ar", "mode auto"]),
        ("in_block_repetition ", [f"in_block_repetition {word}" for word in ("on", "off")]),
        ("sampler f", ["sampler factor", "sampler fixed_steps"]),
        ("draft_width 1", ["draft_width 1", "draft_width 16"]),
        ("top_k ", []),
        ("nothing ", []),
    ],
)
def test_values_are_completed_after_their_key(typed: str, values: list[str]) -> None:
    found = [value for value in keys_and_values(typed) if value.startswith(typed)]
    assert [value for value in found if not value.endswith("default")] == values
    assert [*keys_and_values("t")] == [*KEYS]


def test_every_value_that_is_offered_is_taken() -> None:
    for name, key in KEYS.items():
        for value in key.values:
            key.convert(value)
        assert key.values or key.kind is not bool, name
