"""The chat as a person has it: a real program on a pseudo-terminal, and what its screen shows."""

import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pexpect
import pyte
import pytest

from clover_local.cli.commands import COMMANDS

pytestmark = pytest.mark.skipif(os.name != "posix", reason="needs a pseudo-terminal")

ENTER, ALT_ENTER, TAB, CTRL_C = "\r", "\x1b\r", "\t", "\x03"
CTRL_O, CTRL_R = "\x0f", "\x12"
MASK = "░"
PASTE, PASTED = "\x1b[200~", "\x1b[201~"
PROMPT_ON, PROMPT_OFF = b"\x1b[?2004h", b"\x1b[?2004l"
"""The input line asks for bracketed paste while it is there."""
PATIENCE = 90  # seconds until a test gives up


class Screen(pyte.HistoryScreen):
    """A screen that says where its cursor is, when it is asked."""

    answer: Callable[[str], None]

    def write_process_input(self, data: str) -> None:
        self.answer(data)


class Terminal:
    """`clover-local ARGUMENTS` on a terminal of its own."""

    def __init__(
        self, *arguments: str, state: Path, rows: int = 24, columns: int = 80, **variables: str
    ) -> None:
        self.state = state / "clover-local"
        self.screen = Screen(columns, rows, history=5000)
        self._stream = pyte.ByteStream(self.screen)
        environment = {
            **os.environ,
            "TERM": "xterm-256color",
            "XDG_STATE_HOME": str(state),
            "OMP_NUM_THREADS": "1",
            **variables,
        }
        for name in ("NO_COLOR", "VISUAL", "COLUMNS", "LINES"):
            if name not in variables:
                environment.pop(name, None)
        self.child = pexpect.spawn(
            sys.executable,
            ["-m", "clover_local", *arguments],
            env=environment,
            dimensions=(rows, columns),
        )
        self.child.delaybeforesend = None
        self.screen.answer = self.send
        self.raw = b""

    def send(self, keys: str | bytes) -> None:
        self.child.send(keys)

    def until(self, holds: Callable[[], bool]) -> None:
        """Reads what the program writes until `holds`."""
        end = time.monotonic() + PATIENCE
        while not holds():
            assert time.monotonic() < end, f"the screen shows:\n{self.text}"
            try:
                new = self.child.read_nonblocking(1 << 16, timeout=0.05)
            except pexpect.TIMEOUT:
                continue
            self.raw += new
            self._stream.feed(new)

    def shows(self, *words: str) -> None:
        """Waits until the screen shows all `words`."""
        self.until(lambda: all(word in self.unwrapped for word in words))

    @property
    def is_ready(self) -> bool:
        return self.raw.rfind(PROMPT_ON) > self.raw.rfind(PROMPT_OFF)

    def enter(self, line: str | bytes, *, clear: bool = True) -> str:
        """Enters a line, waits for the next prompt; returns what the screen shows, unwrapped."""
        self.until(lambda: self.is_ready)
        if clear:
            self.screen.reset()
        before = self.raw.count(PROMPT_ON)
        self.send(line)
        self.send(ENTER)
        self.until(lambda: self.raw.count(PROMPT_ON) > before and self.is_ready)
        self.until(lambda: self.text.rstrip().endswith(">"))
        return self.unwrapped

    def clear_line(self) -> None:
        """Drops what is on the input line."""
        before = self.raw.count(PROMPT_ON)
        self.send(CTRL_C)
        self.until(lambda: self.raw.count(PROMPT_ON) > before and self.is_ready)

    def resize(self, rows: int, columns: int) -> None:
        if (rows, columns) == (self.screen.lines, self.screen.columns):
            return
        at_prompt, before = self.is_ready, self.raw.count(PROMPT_ON)
        self.screen.resize(rows, columns)
        self.child.setwinsize(rows, columns)
        if at_prompt:
            self.until(lambda: self.raw.count(PROMPT_ON) > before and self.is_ready)

    def messages(self) -> list[str]:
        """The conversation, by way of a session file."""
        self.enter("/save now")
        content = json.loads((self.state / "sessions" / "now.json").read_text(encoding="utf-8"))
        return [message["content"] for message in content["messages"]]

    @property
    def unwrapped(self) -> str:
        """All cells of the screen in a row."""
        return "".join(self.screen.display)

    @property
    def text(self) -> str:
        """The lines of the screen."""
        return "\n".join(line.rstrip() for line in self.screen.display).strip("\n")


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Terminal]:
    """A chat with the demo model, which all tests share."""
    folder = tmp_path_factory.mktemp("terminal")
    editor = folder / "editor"
    editor.write_text("#!/bin/sh\nsed -i s/seventeen/17/ $1\n")
    editor.chmod(0o755)
    terminal = Terminal("chat", "demo", state=folder, EDITOR=str(editor))
    terminal.until(lambda: terminal.is_ready)
    yield terminal
    terminal.child.close(force=True)


@pytest.fixture
def terminal(running: Terminal) -> Terminal:
    """The same in a new conversation with the model's settings, on 24 lines of 80 columns."""
    running.resize(24, 80)
    running.clear_line()
    for line in ("/new", "/think auto", "/thinking show", "/watch block", "/mode denoise"):
        running.enter(line)
    for key in ("suppress", "max_new_tokens"):
        running.enter(f"/set {key} default")
    return running


def write_long(terminal: Terminal) -> None:
    """Makes the next answers endless."""
    terminal.enter("/set suppress 1007,1009")
    terminal.enter("/set max_new_tokens 3500")


def test_tab_completes_commands_keys_values_and_files(terminal: Terminal, tmp_path: Path) -> None:
    def typed(keys: str, *shown: str) -> None:
        terminal.screen.reset()
        terminal.clear_line()
        terminal.send(keys)
        terminal.shows(*shown)

    typed("/wa" + TAB, "/watch")
    terminal.send(" h" + TAB)
    terminal.shows("/watch heat")
    typed("/set mode " + TAB, "denoise", "ar", "draft", "auto", "default")
    typed("/set sampler " + TAB, "threshold", "entropy_bound", "klass")
    typed("/set in_block_repetition " + TAB, "on", "off", "default")
    typed("/set thr" + TAB, "/set threshold")
    typed("/think " + TAB, "on", "off", "auto")
    typed("/thinking f" + TAB, "/thinking fold")
    typed("/help /und" + TAB, "/help /undo")
    (tmp_path / "notes.txt").write_text("Some notes.")
    typed(f"/read {tmp_path}/no" + TAB, "notes.txt")
    terminal.send(ENTER)
    terminal.shows("11 characters go before")
    assert "11 characters" not in terminal.enter("/read none")


def test_a_question_may_have_several_lines(terminal: Terminal) -> None:
    terminal.enter("What is 17" + ALT_ENTER + "+ 26?")
    terminal.enter('"""What is' + ENTER + '18 + 26?"""')
    asked = terminal.messages()[0::2]
    assert asked == ["What is 17\n+ 26?", "What is\n18 + 26?"]


def test_ctrl_r_finds_a_question_and_ctrl_o_opens_it_in_the_editor(terminal: Terminal) -> None:
    terminal.enter("What is seventeen + 26?")
    terminal.send(CTRL_R + "seventeen")
    terminal.shows("What is seventeen + 26?", "search backward: seventeen")
    terminal.send(ENTER)
    terminal.until(lambda: "search" not in terminal.text)
    terminal.send(CTRL_O)
    terminal.shows("What is 17 + 26?")
    terminal.enter("", clear=False)
    assert terminal.messages()[0::2] == ["What is seventeen + 26?", "What is 17 + 26?"]


@pytest.mark.parametrize("mode", ["denoise", "ar", "draft"])
def test_ctrl_c_in_the_middle_of_a_block_ends_the_answer_only(
    terminal: Terminal, mode: str
) -> None:
    write_long(terminal)
    terminal.enter(f"/mode {mode}")
    terminal.screen.reset()
    terminal.send("Count from 1 to 30." + ENTER)
    terminal.until(lambda: len(terminal.text.replace(MASK, "")) > 300)  # more than a block
    before = terminal.raw.count(PROMPT_ON)
    terminal.send(CTRL_C)
    terminal.until(lambda: terminal.raw.count(PROMPT_ON) > before)
    terminal.shows("tok/s", "stopped")
    assert MASK not in terminal.text
    terminal.enter("/set suppress default")
    terminal.enter("/set max_new_tokens 40")
    assert "tok/s" in terminal.enter("What is 17 + 26?")
    messages = terminal.messages()
    assert len(messages) == 4
    assert all(messages)
    assert "tokens_per_second" in terminal.enter("/stats")


def test_a_change_of_size_harms_neither_an_answer_nor_the_input_line(terminal: Terminal) -> None:
    write_long(terminal)
    terminal.screen.reset()
    terminal.send("Count from 1 to 30." + ENTER)
    for rows, columns in ((24, 80), (12, 31), (30, 100), (5, 20), (24, 80)):
        terminal.resize(rows, columns)
        seen = len(terminal.raw)
        terminal.until(lambda seen=seen: len(terminal.raw) > seen + 500)  # type: ignore[misc]
    terminal.send(CTRL_C)
    terminal.shows("stopped")
    terminal.until(lambda: terminal.text.rstrip().endswith(">"))
    assert MASK not in terminal.text
    terminal.enter("/set suppress default")
    terminal.send("What is 17")
    terminal.resize(30, 40)
    terminal.send(" + 26?")
    terminal.shows("> What is 17 + 26?")
    terminal.resize(24, 80)
    terminal.enter("", clear=False)
    assert terminal.messages()[2] == "What is 17 + 26?"


@pytest.mark.parametrize(("rows", "columns"), [(24, 20), (5, 80), (3, 10)])
def test_a_tiny_terminal_shows_the_whole_answer(
    terminal: Terminal, rows: int, columns: int
) -> None:
    terminal.enter("/think on")
    terminal.resize(rows, columns)
    terminal.enter("What is 17 + 26?")
    shown = "".join(
        "".join(line[column].data for column in range(columns))
        for line in terminal.screen.history.top
    ) + "".join(terminal.screen.display)
    answer = terminal.messages()[1].partition("</think>\n\n")[2]
    assert answer.replace(" ", "") in shown.replace(" ", "")
    assert MASK not in terminal.text


def test_a_paste_of_100_kb_arrives_whole_and_is_refused_in_one_sentence(
    terminal: Terminal,
) -> None:
    lines = [f"line {number} of a long text" for number in range(4100)]
    pasted = "\n".join(lines)
    assert len(pasted) > 100_000
    terminal.until(lambda: terminal.is_ready)
    terminal.screen.reset()
    before, seen = terminal.raw.count(PROMPT_ON), len(terminal.raw)
    written = 0
    while written < len(pasted):  # a terminal takes no more than its buffer at once
        piece = pasted[written : written + 1000]
        written += len(piece)
        terminal.send((PASTE if written == len(piece) else "") + piece)
        terminal.until(lambda: True)
    terminal.send(PASTED + ENTER)
    terminal.until(lambda: terminal.raw.count(PROMPT_ON) > before)
    terminal.shows("error: the prompt has", "raise --context")
    assert len(terminal.raw) - seen < 20_000  # it was not painted over and over
    history = (terminal.state / "history").read_text(encoding="utf-8")
    assert history.endswith("".join(f"+{line}\n" for line in lines))
    assert terminal.messages() == []


DAMAGED: dict[str, Callable[[bytes], bytes]] = {
    "cut": lambda content: content[: len(content) // 2],
    "empty": lambda content: b"",
    "no utf-8": lambda content: content.replace(b"What", b"Wh\xe4t"),
    "another version": lambda content: content.replace(b'session": 1', b'session": 99'),
    "binary": lambda content: bytes(range(256)) * 10,
}


def test_damaged_sessions_are_refused_in_one_sentence_each(terminal: Terminal) -> None:
    terminal.enter("What is 17 + 26?")
    messages = terminal.messages()
    path = terminal.state / "sessions" / "now.json"
    content = path.read_bytes()
    for damage in DAMAGED.values():
        (path.parent / "bad.json").write_bytes(damage(content))
        shown = terminal.enter("/load bad")
        assert shown.count("error:") == 1
        assert "is no session, or damaged" in shown
    assert "damaged" in terminal.enter("/sessions")
    (path.parent / "bad.json").unlink()
    assert "there is no session bad" in terminal.enter("/load bad")
    assert terminal.messages() == messages
    assert "now: 1 turns" in terminal.enter("/load now")


def test_bytes_that_are_no_utf_8_are_refused_in_one_sentence(terminal: Terminal) -> None:
    shown = terminal.enter(b"caf\xe9 and more")
    assert "what was typed is not UTF-8 (byte 3)" in shown
    assert "Traceback" not in shown
    assert "tok/s" in terminal.enter("What is 17 + 26?")
    assert terminal.messages()[0] == "What is 17 + 26?"


def test_thinking_is_dim_folds_to_a_line_and_can_be_read_later(terminal: Terminal) -> None:
    terminal.enter("/think on")
    seen = len(terminal.raw)
    terminal.enter("What is 17 + 26?")
    thought, _, answer = terminal.messages()[1].removeprefix("<think>\n").partition("\n</think>")
    first = thought.split("\n")[0].encode()
    assert b"\x1b[2m" + first in terminal.raw[seen:]
    terminal.enter("/thinking fold")
    terminal.enter("/regen", clear=True)
    lines = terminal.text.splitlines()
    summary = next(index for index, line in enumerate(lines) if line.startswith("▸ thought for "))
    assert lines[summary].endswith("s (/thinking shows it)")
    assert lines[summary + 1] == answer.strip().split("\n")[0]
    assert first.decode() not in terminal.text
    assert first.decode() in terminal.enter("/thinking")


def test_every_command_takes_a_bad_argument_without_a_traceback(terminal: Terminal) -> None:
    for name in COMMANDS:
        if name not in ("/system", "/edit"):
            shown = terminal.enter(f"{name} no-such-thing")
            assert "Traceback" not in shown
            assert "unexpected" not in shown
            assert shown.count("error:") == (name not in ("/save", "/load")), name


def test_without_colours_there_are_none(tmp_path: Path) -> None:
    terminal = Terminal("chat", "demo", "--think", state=tmp_path, NO_COLOR="1")
    terminal.enter("What is 17 + 26?")
    terminal.send("/exit" + ENTER)
    terminal.child.expect(pexpect.EOF)
    styles = set(re.findall(rb"\x1b\[([\d;]*)m", terminal.raw + terminal.child.before))
    assert styles <= {b"", b"0"}


def test_a_dumb_terminal_gets_plain_text_and_ctrl_c_ends_an_answer_there_too(
    tmp_path: Path,
) -> None:
    terminal = Terminal("chat", "demo", state=tmp_path, TERM="dumb")
    terminal.shows(">")
    terminal.send("/set suppress 1007,1009\n/set max_new_tokens 3500\nCount from 1 to 30.\n")
    begun = len(terminal.raw)
    terminal.until(lambda: len(terminal.raw) > begun + 150)
    terminal.send(CTRL_C)
    terminal.shows("stopped")
    terminal.send("/set max_new_tokens 5\nWhat is 17 + 26?\n/exit\n")
    terminal.child.expect(pexpect.EOF)
    assert b"\x1b" not in terminal.raw + terminal.child.before
    terminal.child.close()
    assert terminal.child.exitstatus == 0
