"""The input line: completion, history, keys (by prompt_toolkit's own pipe input)."""

import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from prompt_toolkit.application import create_app_session
from prompt_toolkit.completion import CompleteEvent
from prompt_toolkit.document import Document
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput

from clover_local.cli.line_editor import CommandCompleter, LineEditor, history_path

CHOICES = {"/set": ("threshold", "temperature", "top_k"), "/show": (), "/think": ("on", "off")}


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty place for the history."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state"


@pytest.fixture
def typed(state: Path) -> Iterator[Callable[[str], str]]:
    """Types keys into an editor and returns the question."""
    with create_pipe_input() as keys, create_app_session(input=keys, output=DummyOutput()):
        editor = LineEditor(CHOICES)

        def type_(text: str) -> str:
            keys.send_bytes(text.encode(errors="surrogateescape"))  # as a terminal decodes it
            return editor.read()

        yield type_


@pytest.mark.parametrize(
    ("text", "completions"),
    [
        ("/s", ["/set", "/show"]),
        ("/set t", ["threshold", "temperature", "top_k"]),
        ("/set te", ["temperature"]),
        ("/think ", ["on", "off"]),
        ("/nothing x", []),
        ("a question about /set", []),
    ],
)
def test_commands_and_their_values_are_completed(text: str, completions: list[str]) -> None:
    found = CommandCompleter(CHOICES).get_completions(Document(text), CompleteEvent())
    assert [completion.text for completion in found] == completions


def test_a_completion_shows_the_word_at_the_cursor_only() -> None:
    completer = CommandCompleter({"/set": lambda typed: ["mode ar", "mode auto"]})
    found = list(completer.get_completions(Document("/set mode a"), CompleteEvent()))
    assert [completion.display_text for completion in found] == ["ar", "auto"]
    assert [completion.text for completion in found] == ["mode ar", "mode auto"]


def test_values_that_are_found_while_typing_are_completed() -> None:
    completer = CommandCompleter({"/load": lambda typed: [typed + "1", "other"]})
    found = completer.get_completions(Document("/load maths"), CompleteEvent())
    assert [completion.text for completion in found] == ["maths1"]


def test_ctrl_o_opens_the_editor(
    typed: Callable[[str], str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    script = tmp_path / "editor"
    script.write_text("#!/bin/sh\nsed -i s/some/another/ $1\n")
    script.chmod(0o755)
    monkeypatch.delenv("VISUAL", raising=False)
    monkeypatch.setenv("EDITOR", str(script))
    assert typed("some text\x0f\r") == "another text"


def test_an_editor_that_fails_leaves_the_line_as_it_was(
    typed: Callable[[str], str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("VISUAL", "/no/such/editor")
    assert typed("some text\x0f\r") == "some text"
    assert "set EDITOR to another" in capsys.readouterr().err


def test_enter_sends_a_line(typed: Callable[[str], str]) -> None:
    assert typed("hello\r") == "hello"


def test_alt_enter_begins_a_new_line(typed: Callable[[str], str]) -> None:
    assert typed("one\x1b\rtwo\r") == "one\ntwo"


def test_enter_within_triple_quotes_begins_a_new_line(typed: Callable[[str], str]) -> None:
    assert typed('"""one\rtwo"""\r') == "one\ntwo"


def test_ctrl_c_and_ctrl_d(typed: Callable[[str], str]) -> None:
    with pytest.raises(KeyboardInterrupt):
        typed("half a line\x03")
    with pytest.raises(EOFError):
        typed("\x04")


def test_questions_are_kept_for_their_owner_only(typed: Callable[[str], str], state: Path) -> None:
    typed("remember me\r")
    assert history_path() == state / "clover-local" / "history"
    assert "remember me" in history_path().read_text(encoding="utf-8")
    assert stat.S_IMODE(history_path().stat().st_mode) == 0o600


def test_ctrl_r_finds_an_earlier_question(typed: Callable[[str], str]) -> None:
    typed("the first question\r")
    typed("another\r")
    assert typed("\x12first\r\r") == "the first question"


def test_a_place_that_cannot_be_written_is_no_obstacle(
    state: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state.write_text("a file where a folder should be")
    with create_pipe_input() as keys, create_app_session(input=keys, output=DummyOutput()):
        keys.send_text("hello\r")
        assert LineEditor(CHOICES).read() == "hello"
    assert "no history is kept" in capsys.readouterr().err


@pytest.mark.skipif(os.name != "posix", reason="needs named pipes")
@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_a_history_without_an_end_is_none(
    state: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    path = history_path()
    path.parent.mkdir(parents=True)
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero")
    with create_pipe_input() as keys, create_app_session(input=keys, output=DummyOutput()):
        keys.send_text("hello\r")
        assert LineEditor(CHOICES).read() == "hello"
    assert "no history is kept" in capsys.readouterr().err


def test_what_the_history_cannot_hold_is_still_a_question(
    typed: Callable[[str], str], state: Path
) -> None:
    assert typed("broken \udcff byte\r") == "broken \udcff byte"
    path = history_path()
    path.unlink()
    path.mkdir()
    assert typed("and a lost file\r") == "and a lost file"


def test_the_history_has_a_place_where_there_is_no_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    monkeypatch.setattr("os.path.expanduser", lambda path: path)  # as for a user without an entry
    assert history_path().name == "history"
