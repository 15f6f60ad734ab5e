"""The slash commands, on the golden model."""

import pytest

from clover_local.cli.commands import COMMANDS, execute
from clover_local.cli.talk import ChatState
from clover_local.decoding.keys import KEYS
from clover_local.errors import SettingsError


def say(line: str, chat: ChatState, capsys: pytest.CaptureFixture[str]) -> str:
    """What a command prints, stdout and stderr."""
    execute(line, chat)
    return "".join(capsys.readouterr())


def test_help_lists_every_command(chat: ChatState, capsys: pytest.CaptureFixture[str]) -> None:
    said = say("/help", chat, capsys)
    assert all(name in said for name in COMMANDS)


@pytest.mark.parametrize(
    ("line", "near"),
    [("/shwo", "/show"), ("/sett x", "/set"), ("/quit", "/exit"), ("/zzz", "/help")],
)
def test_an_unknown_command_suggests_the_nearest(chat: ChatState, line: str, near: str) -> None:
    with pytest.raises(SettingsError, match=near):
        execute(line, chat)


def test_exit_ends_like_the_end_of_input(chat: ChatState) -> None:
    with pytest.raises(EOFError):
        execute("/exit", chat)


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


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("/set", "key and a value"),
        ("/set threshold", "key and a value"),
        ("/set treshold 1", "did you mean threshold"),
        ("/set threshold two", "from 0 to 1"),
        ("/mode drafts", "denoise, ar"),
        ("/watch tv", "off, block, heat"),
        ("/think maybe", "on, off, auto"),
    ],
)
def test_a_wrong_argument_changes_nothing(chat: ChatState, line: str, words: str) -> None:
    before = chat.resolved
    with pytest.raises(SettingsError, match=words):
        execute(line, chat)
    assert chat.resolved is before
    assert chat.watch == "block"


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


def test_system_is_set_shown_and_removed(
    chat: ChatState, capsys: pytest.CaptureFixture[str]
) -> None:
    assert say("/system Be  brief.", chat, capsys) == "system: Be  brief.\n"
    assert chat.conversation.system == "Be  brief."
    assert say("/system", chat, capsys) == "system: Be  brief.\n"
    assert say("/system none", chat, capsys) == "system: none\n"
    assert chat.conversation.system is None


def test_think_says_when_the_template_has_no_switch(
    chat: ChatState, capsys: pytest.CaptureFixture[str]
) -> None:
    said = say("/think on", chat, capsys)
    assert chat.conversation.thinking is True
    assert "no effect" in said
    say("/think auto", chat, capsys)
    assert chat.conversation.thinking is None


def test_watch_is_changed(chat: ChatState, capsys: pytest.CaptureFixture[str]) -> None:
    assert say("/watch heat", chat, capsys) == "watch: heat\n"
    assert chat.watch == "heat"


def test_stats_show_the_answer_and_the_state(
    chat: ChatState, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "tokens  " in say("/stats", chat, capsys)
    list(chat.conversation.ask("hello"))
    chat.last = chat.conversation.generator.result
    said = say("/stats", chat, capsys)
    assert "tokens_per_preview" in said
    assert "recurrent" in said
    assert f"{chat.conversation.generator.state.length} of" in said


def test_cache_without_one_says_so_and_takes_no_number(
    chat: ChatState, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "every expert is on the device" in say("/cache", chat, capsys)
    with pytest.raises(SettingsError, match="start with --expert-slots N"):
        execute("/cache 9", chat)


def test_cache_shows_what_it_did_and_changes_its_size(
    small_cache_chat: ChatState, capsys: pytest.CaptureFixture[str]
) -> None:
    chat = small_cache_chat
    list(chat.conversation.ask("hello"))
    chat.last = chat.conversation.generator.result
    said = say("/cache", chat, capsys)
    for words in ("slots", "9, of these", "of 32", "previews", "prompts", "misses"):
        assert words in said
    assert "expert misses" in say("/stats", chat, capsys)
    assert "20, of these" in say("/cache 20", chat, capsys)
    for line, words in (("/cache 99", "4 to 32"), ("/cache many", "a number of slots")):
        with pytest.raises(SettingsError, match=words):
            execute(line, chat)


def test_new_forgets_the_conversation(chat: ChatState, capsys: pytest.CaptureFixture[str]) -> None:
    list(chat.conversation.ask("hello"))
    say("/new", chat, capsys)
    assert chat.conversation.messages == []
