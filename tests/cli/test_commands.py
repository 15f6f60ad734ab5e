"""The slash commands, on the golden model."""

import pytest

from clover_local.cli.commands import COMMANDS, execute
from clover_local.cli.talk import ChatState
from clover_local.errors import SettingsError

ALL = [*COMMANDS.items()]


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
    ("line", "words"),
    [
        ("/set treshold", "did you mean threshold"),
        ("/set treshold default", "did you mean threshold"),
        ("/set treshold 1", "did you mean threshold"),
        ("/set threshold two", "from 0 to 1"),
        ("/mode drafts", "denoise, ar"),
        ("/watch tv", "off, block, heat"),
        ("/think maybe", "on, off, auto"),
        ("/think 0", "leaves no token"),
        ("/think -5", "number of tokens"),
        ("/think " + "9" * 5000, "number of tokens"),
        ("/thinking hide", "show, fold"),
        ("/show thinkng", "did you mean thinking"),
        ("/show treshold", "did you mean threshold"),
        ("/help shwo", "did you mean /show"),
        ("/new topic", "takes nothing after it"),
        ("/exit now", "takes nothing after it"),
    ],
)
def test_a_wrong_argument_changes_nothing(chat: ChatState, line: str, words: str) -> None:
    before = chat.resolved
    with pytest.raises(SettingsError, match=words):
        execute(line, chat)
    assert chat.resolved is before
    assert chat.watch == "block"


def test_system_is_set_shown_and_removed(
    chat: ChatState, capsys: pytest.CaptureFixture[str]
) -> None:
    assert say("/system Be  brief.", chat, capsys) == "system: Be  brief.\n"
    assert chat.conversation.system == "Be  brief."
    assert say("/system", chat, capsys) == "system: Be  brief.\n"
    assert say("/system none", chat, capsys) == "system: none\n"
    assert chat.conversation.system is None


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
    for line, words in (
        ("/cache 99", "4 to 32"),
        ("/cache many", "a number of slots"),
        ("/cache ²", "a number of slots"),
        ("/cache " + "9" * 5000, "a number of slots"),
    ):
        with pytest.raises(SettingsError, match=words):
            execute(line, chat)


def test_help_on_a_command_says_more(chat: ChatState, capsys: pytest.CaptureFixture[str]) -> None:
    assert "/set KEY default" in say("/help set", chat, capsys)
    assert say("/help /set", chat, capsys) == say("/help set", chat, capsys)
    assert all(command.help in say(f"/help {name}", chat, capsys) for name, command in ALL)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("watch", ("green from 99 %", "red below", "masks")),
        ("mode", ("denoise: ", "ar: ", "draft: ", "auto: ")),
        ("cache", ("A slot",)),
        ("read", ("waits if that one fails",)),
        ("thinking", ("fold: ",)),
    ],
)
def test_help_explains_the_words_of_a_command(
    chat: ChatState, capsys: pytest.CaptureFixture[str], name: str, words: tuple[str, ...]
) -> None:
    said = say(f"/help {name}", chat, capsys)
    assert all(word in said for word in words)


def test_new_forgets_the_conversation(chat: ChatState, capsys: pytest.CaptureFixture[str]) -> None:
    list(chat.conversation.ask("hello"))
    say("/new", chat, capsys)
    assert chat.conversation.messages == []
