"""The chat loop: on a pseudo-terminal as a person has it, and in a pipe."""

import io
import os
import re
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import pexpect
import pytest

from clover_local.cli import repl
from clover_local.cli.talk import ChatState

READY = "\x1b[?2004h"  # the input line asks for bracketed paste when it is ready
ENTER, CTRL_C, CTRL_D = "\r", "\x03", "\x04"
STATUS = r"(\d+) tokens · .*\r\n"


def pipe(monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content), encoding="utf-8"))


def spawned(folder: Path, state: Path, kind: str) -> Any:
    """`clover-local chat` on a terminal of this kind."""
    environment = {
        **os.environ,
        "XDG_STATE_HOME": str(state),
        "TERM": kind,
        "PROMPT_TOOLKIT_NO_CPR": "1",
        "OMP_NUM_THREADS": "1",
    }
    return pexpect.spawn(
        sys.executable,
        ["-m", "clover_local", "chat", str(folder), "--max-new-tokens", "33"],
        env=environment,
        encoding="utf-8",
        dimensions=(24, 80),
        timeout=60,
    )


@pytest.fixture
def terminal(golden_folder: Path, tmp_path: Path) -> Iterator[Any]:
    """`clover-local chat` on the golden model, at its first prompt."""
    child = spawned(golden_folder, tmp_path, "xterm-256color")
    child.expect_exact(READY)
    yield child
    child.close(force=True)


@pytest.mark.skipif(os.name != "posix", reason="needs a pseudo-terminal")
def test_a_person_chats(terminal: Any) -> None:
    def enter(line: str, *expected: str) -> None:
        terminal.send(line + ENTER)
        for pattern in expected:
            terminal.expect(pattern)
        terminal.expect_exact(READY)

    enter("hello", "░", STATUS)  # the active block was in view
    assert terminal.match is not None

    # Ctrl-C stops the answer only; the next question is answered in full.
    enter("/set max_new_tokens 100000", "max_new_tokens = 100000")
    terminal.send("go on" + ENTER)
    terminal.expect("░")
    terminal.send(CTRL_C)
    terminal.expect(STATUS)
    assert "stopped" in terminal.match.group(0)
    terminal.expect_exact(READY)
    enter("/set max_new_tokens 5", "max_new_tokens = 5")
    terminal.send("and now" + ENTER)
    terminal.expect(STATUS)
    assert terminal.match.group(1) == "5"
    terminal.expect_exact(READY)

    enter("/show", r"max_new_tokens[^\r]*m5 +/set")
    enter("/stats", "recurrent")
    enter("/shwo", "did you mean /show")
    enter("/set treshold 1", "did you mean threshold")

    terminal.send("half a line" + CTRL_C)  # clears the line, and the chat goes on
    terminal.expect_exact(READY)
    enter("/watch off", "watch: off")
    terminal.send("/exit" + ENTER)
    terminal.expect(pexpect.EOF)
    terminal.close()
    assert terminal.exitstatus == 0


@pytest.mark.skipif(os.name != "posix", reason="needs a pseudo-terminal")
def test_a_person_goes_back_and_keeps_the_conversation(
    terminal: Any, tmp_path: Path, model_folder: Path
) -> None:
    def enter(line: str, *expected: str) -> None:
        terminal.send(line + ENTER)
        for pattern in expected:
            terminal.expect(pattern)
        terminal.expect_exact(READY)

    text = tmp_path / "text.txt"
    text.write_text("long " * 20_000, encoding="utf-8")
    enter("hello", STATUS)
    enter("/regen", "at temperature 0", STATUS)
    enter("/copy", r"\]52;c;", "copied")
    enter(f"/read {text}", "100,000 characters")
    enter("/read none", "nothing goes before")
    enter("/save talk", "saved")
    enter("/undo", "taken back: hello")
    enter("/undo", "no question left")
    enter("/load talk", "talk: 1 turns")
    for typed, completed in (("/lo\t", "ad"), (" ta\t", "lk")):  # the command, the session
        terminal.send(typed)
        terminal.expect_exact(completed)
    enter("", "talk: 1 turns")
    enter(f"/model {model_folder}", f"model: {model_folder}")
    enter("go on", STATUS)
    (tmp_path / "clover-local" / "sessions" / "talk.json").write_text("{", encoding="utf-8")
    enter("/load talk", "no session, or damaged")
    enter("/sessions", r"talk[^\r]*damaged")


@pytest.mark.skipif(os.name != "posix", reason="needs a pseudo-terminal")
def test_ctrl_c_drops_the_line_of_a_plain_terminal_too(golden_folder: Path, tmp_path: Path) -> None:
    child = spawned(golden_folder, tmp_path, "dumb")
    child.expect_exact("> ")
    for _ in range(3):
        child.send("half a line" + CTRL_C)
        child.expect_exact("> ")
    child.sendline("/think 0")
    child.expect_exact("leaves no token")
    child.expect_exact("> ")
    child.sendline("/exit")
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 1  # a command failed


@pytest.mark.skipif(os.name != "posix", reason="needs signals")
def test_a_ctrl_c_between_two_lines_stops_nothing(
    chat: ChatState, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    heard = list[str]()

    class Editor:
        def __init__(self, choices: object) -> None: ...

        def read(self) -> str:
            os.kill(os.getpid(), signal.SIGINT)
            if len(heard) == 2:
                raise EOFError
            return "/stats"

    def command(line: str, chat: ChatState) -> None:
        heard.append(line)
        os.kill(os.getpid(), signal.SIGINT)
        pytest.fail("a command hears it")

    before = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr("clover_local.cli.line_editor.LineEditor", Editor)
    monkeypatch.setattr("clover_local.cli.commands.execute", command)
    repl.converse(chat)
    assert heard == ["/stats", "/stats"]
    assert signal.getsignal(signal.SIGINT) is before
    assert "".join(capsys.readouterr()) == ""


@pytest.mark.skipif(os.name != "posix", reason="needs a pseudo-terminal")
def test_ctrl_d_leaves(terminal: Any) -> None:
    terminal.send(CTRL_D)
    terminal.expect(pexpect.EOF)
    terminal.close()
    assert terminal.exitstatus == 0


def test_lines_of_a_pipe_are_answered_in_plain_text(
    chat: ChatState, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pipe(monkeypatch, b"/set max_new_tokens 3\nhello\n\nand again\n/exit\nnever read\n")
    assert repl.converse_plainly(chat)
    out = capsys.readouterr().out
    roles = [message["role"] for message in chat.conversation.messages]
    assert roles == ["user", "assistant"] * 2
    answers = [str(message["content"]) for message in chat.conversation.messages[1::2]]
    assert out == f"max_new_tokens = 3\n{answers[0]}\n{answers[1]}\n"
    assert not re.search("\x1b", out)


def test_a_question_that_fails_leaves_the_next_ones_alone(
    chat: ChatState, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    chat.conversation.generator.state.context = 128
    pipe(monkeypatch, b"/nonsense\n" + b"x" * 200 + b"\nshort\n")
    assert not repl.converse_plainly(chat)
    outcome = capsys.readouterr()
    assert outcome.err.count("error: ") == 2
    assert "context holds 128" in outcome.err
    assert [message["content"] for message in chat.conversation.messages[:1]] == ["short"]


def test_a_line_that_fails_unexpectedly_leaves_the_next_ones_alone(
    chat: ChatState, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*arguments: object) -> None:
        raise ValueError("nobody thought of it")

    monkeypatch.setattr("clover_local.cli.commands.asdict", fail)
    pipe(monkeypatch, b"/stats\n/read a\0b\nshort\n")
    assert not repl.converse_plainly(chat)
    first, second, _ = capsys.readouterr().err.splitlines()
    assert "unexpected ValueError: nobody thought of it" in first
    assert second.startswith("error: 'a\\x00b' is no path")
    assert chat.conversation.last_question == "short"


def test_a_line_without_an_end_is_one_error(
    chat: ChatState, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("clover_local.cli.lines.LARGEST", 100)
    pipe(monkeypatch, b"short\n" + b"x" * 1000)
    assert not repl.converse_plainly(chat)
    assert capsys.readouterr().err.count("error: ") == 1
    assert chat.conversation.last_question == "short"


def test_thinking_goes_to_stderr_in_plain_text(
    chat: ChatState, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from clover_local.chat import Piece

    monkeypatch.setattr(
        chat.conversation, "ask", lambda question: iter_pieces(("hm", True), ("Yes.", False))
    )

    def iter_pieces(*pieces: tuple[str, bool]) -> Iterator[Piece]:
        yield from (Piece(text, thinking) for text, thinking in pieces)

    repl.answer_plainly(chat, "well?")
    outcome = capsys.readouterr()
    assert outcome.out == "Yes.\n"
    assert outcome.err.startswith("hm")


def test_ctrl_c_ends_plain_text_and_leaves_the_chat_usable(
    chat: ChatState, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = chat.conversation.generator.model
    preview, calls = model.preview, []

    def interrupted(*arguments: Any) -> object:
        calls.append(arguments)
        if len(calls) == 40:
            raise KeyboardInterrupt
        return preview(*arguments)

    monkeypatch.setattr(model, "preview", interrupted)
    with pytest.raises(KeyboardInterrupt):
        repl.answer_plainly(chat, "hello")
    assert chat.last is not None
    assert chat.last.finish_reason == "cancelled"
    repl.answer_plainly(chat, "again")
    assert chat.last.finish_reason == "length"
    assert chat.last.reused_tokens > 0


@pytest.mark.skipif(os.name != "posix", reason="needs a pseudo-terminal")
def test_sigterm_puts_the_terminal_back(terminal: Any) -> None:
    terminal.sendline("hello")  # during the answer there is no echo, at the prompt no line mode
    terminal.kill(signal.SIGTERM)
    with suppress(OSError):  # the terminal is gone with its last user
        terminal.expect(pexpect.EOF)
    terminal.close()
    assert terminal.exitstatus == 143


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), MemoryError()])
def test_an_error_ends_its_turn_and_not_the_chat(
    chat: ChatState,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: Exception,
) -> None:
    lines = iter(["/stats", "/help"])

    class Editor:
        def __init__(self, choices: object) -> None: ...

        def read(self) -> str:
            if (line := next(lines, None)) is None:
                raise EOFError
            return line

    def fail(*arguments: object) -> None:
        raise error

    monkeypatch.setattr("clover_local.cli.line_editor.LineEditor", Editor)
    monkeypatch.setattr("clover_local.cli.commands.stats_rows", fail)
    monkeypatch.setattr("clover_local.cli.commands.asdict", fail)
    repl.converse(chat)
    out, err = capsys.readouterr()
    assert err.startswith("error: ") and err.count("\n") == 1
    assert "/help" in out


@pytest.mark.parametrize("name", ["AnswerView", "hidden_keys"])
def test_a_view_that_cannot_begin_leaves_no_thread_behind(
    chat: ChatState, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def fail(*arguments: object, **more: object) -> object:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(repl, "hidden_keys", nullcontext)
    monkeypatch.setattr(repl, name, fail)
    before = threading.enumerate()
    with pytest.raises(OSError, match="Input/output"):
        repl.show_live(chat, chat.conversation.ask("hello"))
    assert threading.enumerate() == before


def test_the_advice_to_take_auto_stands_below_the_status_line(
    chat: ChatState, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from clover_local.decoding.auto.chooser import Rate

    generator = chat.conversation.generator
    monkeypatch.setattr(repl, "hidden_keys", nullcontext)
    for faster, lines in ((None, 0), (Rate("draft", 4.0, 5.0), 1)):
        monkeypatch.setattr(generator, "advice", lambda rate=faster: rate)
        repl.show_live(chat, chat.conversation.ask("hello"))
        assert capsys.readouterr().out.count("draft would make about 800 tok/s") == lines
    assert generator.spectator is not None
