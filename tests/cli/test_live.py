"""The view of an answer, on a terminal of a few lines of Python."""

import os
import random
import re
import shutil
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

import pytest

from clover_local.chat import Piece
from clover_local.cli import console
from clover_local.cli.live import AnswerView, advance, step
from clover_local.cli.preferences import ThinkingView, Watch
from clover_local.cli.writer import Output, Throttle
from clover_local.decoding.events import PassDone, PromptProgress
from clover_local.decoding.result import Fixed

Call = Callable[..., Any]
"""A fixture that is called with the arguments of a command, or of a terminal."""

MASK = 99
WORDS = ["a", "bc", "déf", "漢字", "\n", "-" * 7, "🙂", "x\ny", ""]


class Screen:
    """Rows of cells; knows what the view writes: text, CR, LF, cursor up, save, restore, erase."""

    def __init__(self, width: int) -> None:
        self.width = width
        self.rows: list[list[str]] = [[]]
        self.row = self.column = 0
        self.saved = (0, 0)

    @property
    def idle(self) -> bool:
        return True

    def send(self, text: str) -> None:
        self.write(text)

    def write(self, text: str) -> None:
        for part in re.findall(r"\x1b\[\d*[A-Za-z]|\x1b[78D]|.", text, flags=re.DOTALL):
            if part in ("\x1b7", "\x1b8", "\x1bD"):
                self._place(part[-1])
            elif part.startswith("\x1b"):
                self._control(int(part[2:-1] or 1), part[-1])
            elif part == "\r":
                self.column = 0
            elif part == "\n":
                self.row, self.column = self.row + 1, 0
            elif part == "\t":
                self.column = min((self.column // 8 + 1) * 8, self.width - 1)
            else:
                self._put(part)
            while self.row >= len(self.rows):
                self.rows.append([])

    def _place(self, kind: str) -> None:
        if kind == "7":
            self.saved = (self.row, self.column)
        elif kind == "8":
            self.row, self.column = self.saved
        else:
            self.row += 1

    def _control(self, count: int, kind: str) -> None:
        if kind == "A":
            assert self.row >= count, "moved above the first line"
            self.row -= count
        elif kind == "J":
            del self.rows[self.row + 1 :]
            del self.rows[self.row][self.column :]
        else:
            raise AssertionError(f"unknown control {kind}")

    def _put(self, character: str) -> None:
        cells = 2 if ord(character) > 0x2E80 else 1
        if self.column + cells > self.width:
            self.row, self.column = self.row + 1, 0
            if self.row >= len(self.rows):
                self.rows.append([])
        row = self.rows[self.row]
        row += [" "] * (self.column - len(row))
        row[self.column : self.column + cells] = [character, ""][:cells]
        self.column += cells

    @property
    def lines(self) -> list[str]:
        text = ["".join(row).rstrip() for row in self.rows]
        while text and not text[-1]:
            text.pop()
        return text


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Screen]:
    """Makes the terminal that the view writes to."""

    def make(*, width: int, height: int = 24) -> Screen:
        terminal = Screen(width)
        size = os.terminal_size((width, height))
        monkeypatch.setattr(shutil, "get_terminal_size", lambda: size)
        monkeypatch.setattr(console, "can_show", lambda glyphs: True)
        return terminal

    return make


def view(output: Output, *, watch: Watch = "block", thinking: ThinkingView = "show") -> AnswerView:
    """A view that paints every pass; token i is WORDS[i]; each look at the clock is a second."""

    def decode(tokens: Sequence[int]) -> str:
        return "".join(WORDS[token] for token in tokens)

    always = Throttle(interval=0, clock=lambda: 0)
    return AnswerView(
        decode,
        output,
        mask_token_id=MASK,
        watch=watch,
        thinking=thinking,
        throttle=always,
        clock=count().__next__,
    )


def done(*tokens: int, number: int = 0, fixed: tuple[Fixed, ...] = ()) -> PassDone:
    return PassDone(0, 0, number, tokens, fixed, 1.0)


def visible(text: str) -> Piece:
    return Piece(text, thinking=False)


def test_the_active_block_follows_the_text_and_masks_fill(screen: Call) -> None:
    terminal = screen(width=40)
    answer = view(terminal)
    answer.add(visible("so: "))
    answer.show_block(done(MASK, 1, MASK))
    assert terminal.lines == ["so: ░bc░"]
    answer.show_block(done(0, 1, MASK, number=1))
    assert terminal.lines == ["so: abc░"]
    answer.add(visible("abc!"))
    assert terminal.lines == ["so: abc!"]


def test_watch_off_shows_committed_text_only(screen: Call) -> None:
    terminal = screen(width=40)
    answer = view(terminal, watch="off")
    answer.show_block(done(MASK, 1))
    answer.add(visible("bc"))
    assert terminal.lines == ["bc"]


def test_a_text_that_ends_at_the_right_edge_goes_on_in_the_next_line(screen: Call) -> None:
    terminal = screen(width=4)
    answer = view(terminal)
    answer.add(visible("abcd"))
    answer.show_block(done(MASK))
    assert terminal.lines == ["abcd", "░"]
    answer.add(visible("e"))
    assert terminal.lines == ["abcd", "e"]


def test_a_tab_moves_to_the_next_stop(screen: Call) -> None:
    terminal = screen(width=30)
    answer = view(terminal)
    answer.add(visible("a\tb"))
    answer.show_block(done(MASK))
    answer.add(visible("c"))
    assert terminal.lines == ["a       bc"]


def test_a_block_higher_than_the_terminal_is_cut(screen: Call) -> None:
    terminal = screen(width=10, height=6)
    answer = view(terminal)
    answer.show_block(done(*[7] * 12))  # 12 times x, newline, y
    assert len(terminal.lines) == 5
    answer.add(visible("end"))
    assert terminal.lines == ["end"]


def test_visible_text_starts_in_a_line_of_its_own_after_thinking(screen: Call) -> None:
    terminal = screen(width=20)
    answer = view(terminal)
    answer.add(Piece("hm", thinking=True))
    answer.add(visible("Yes."))
    assert terminal.lines == ["hm", "", "Yes."]


def test_closing_takes_the_block_away_and_ends_the_line(screen: Call) -> None:
    terminal = screen(width=20)
    answer = view(terminal)
    answer.add(visible("half an"))
    answer.show_block(done(MASK, MASK))
    answer.close()
    terminal.write("> ")
    assert terminal.lines == ["half an", ">"]


def test_control_characters_of_the_model_never_reach_the_terminal(screen: Call) -> None:
    terminal = screen(width=30)
    answer = view(terminal)
    answer.add(visible("a\x1b[2Jb\x07c"))
    assert terminal.lines == ["a[2Jbc"]


def test_a_long_prompt_shows_how_far_it_is(screen: Call) -> None:
    terminal = screen(width=60)
    answer = view(terminal)
    answer.show_prompt(PromptProgress(512, 1300))
    assert terminal.lines == ["reading the prompt: 512 of 1300 tokens"]
    answer.add(visible("ok"))
    assert terminal.lines == ["ok"]


@pytest.mark.parametrize("width", [3, 7, 16, 80])
def test_painting_never_changes_what_is_left_at_the_end(screen: Call, width: int) -> None:
    chance = random.Random(width)
    terminal = screen(width=width, height=9)
    answer = view(terminal)
    text = ""
    for _ in range(60):
        block = [chance.choice([*range(len(WORDS)), MASK]) for _ in range(chance.randrange(1, 9))]
        answer.show_block(done(*block))
        if chance.random() < 0.5:
            text += (piece := chance.choice(WORDS))
            answer.add(visible(piece))
    answer.close()
    painted = terminal.lines
    plain = Screen(width)
    plain.write(text)
    assert [line for line in painted if line] == [line for line in plain.lines if line]


@pytest.fixture
def coloured(screen: Call, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, list[str]]:
    """A terminal with colours, and what is sent to it."""
    terminal = screen(width=40)
    written: list[str] = []
    monkeypatch.setattr(terminal, "send", written.append)
    monkeypatch.setattr(console, "has_colour", lambda stream: True)
    return terminal, written


def test_heat_colours_a_token_by_its_confidence(coloured: tuple[Any, list[str]]) -> None:
    terminal, written = coloured
    answer = view(terminal, watch="heat")
    answer.show_block(done(0, 1, MASK, fixed=(Fixed(0, 0, 0.999), Fixed(1, 1, 0.3))))
    assert "\x1b[32ma\x1b[0m\x1b[31mbc\x1b[0m\x1b[2m░\x1b[0m" in written[0]


def test_thinking_is_dim_and_so_is_its_active_block(coloured: tuple[Any, list[str]]) -> None:
    terminal, written = coloured
    answer = view(terminal)
    answer.show_block(done(0, MASK), thinking=True)
    answer.add(Piece("hm", thinking=True))
    answer.show_block(done(0))
    answer.add(visible("yes"))
    assert "\x1b[2ma\x1b[0m\x1b[2m░\x1b[0m" in written[0]
    assert "\x1b[2mhm\x1b[0m" in written[1]
    assert "\x1b7a\x1b8" in written[2]
    assert written[3].endswith("\n\nyes")


def test_folded_thinking_is_a_line_that_counts_and_then_one_that_sums_up(screen: Call) -> None:
    terminal = screen(width=60)
    answer = view(terminal, thinking="fold")
    answer.show_block(done(0, MASK), thinking=True)
    assert terminal.lines == ["thinking…"]
    answer.add(Piece("hm hm", thinking=True, tokens=3))
    assert terminal.lines == ["thinking… 3 tokens"]
    answer.add(Piece("hm", thinking=True, tokens=1))
    assert terminal.lines == ["thinking… 4 tokens"]
    answer.add(visible("Yes."))
    summary = "▸ thought for 4 tokens, 1.0 s (/thinking shows it)"
    assert terminal.lines == [summary, "Yes."]
    answer.add(Piece("wait", thinking=True, tokens=1))
    answer.add(visible("No."))
    assert terminal.lines == [summary, "Yes.", summary.replace("4 tokens", "1 token"), "No."]


def test_thinking_that_is_cut_short_is_summed_up_too(screen: Call) -> None:
    terminal = screen(width=60)
    answer = view(terminal, watch="off", thinking="fold")
    answer.add(Piece("hm", thinking=True, tokens=7))
    answer.close()
    terminal.write("> ")
    assert terminal.lines == ["▸ thought for 7 tokens, 1.0 s (/thinking shows it)", ">"]


def test_no_frame_is_sent_before_the_terminal_has_taken_all(
    screen: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = screen(width=40)
    answer = view(terminal)
    monkeypatch.setattr(Screen, "idle", False)
    answer.show_block(done(0, MASK))
    answer.add(visible("text is not lost"))
    assert terminal.lines == ["text is not lost"]
    monkeypatch.setattr(Screen, "idle", True)
    answer.show_block(done(0, MASK))
    assert terminal.lines == ["text is not losta░"]


@pytest.mark.parametrize("width", [1, 2, 7, 80])
def test_a_text_without_wide_characters_advances_like_its_characters(width: int) -> None:
    chance = random.Random(width)
    column = cells = 0
    stepped = 0
    for _ in range(200):
        text = "".join(chance.choices("ab \n", k=chance.randrange(12)))
        column, cells = advance(text, column, cells, width=width)
        for character in text:
            stepped, _ = step(character, stepped, width)
        assert column == stepped
    tail = "x" * 3 + "漢"
    assert advance(tail, column, cells, width=100)[1] == cells + 5
