"""How an answer appears on a terminal: committed text scrolls, the active block is repainted.

Committed text is written once, unwrapped, so that it can be copied from the terminal. The active
block follows it on the same line; after each painting the terminal itself puts the cursor back to
where the committed text ends, so that a change of its size in between does no harm. Painting keeps
to a small share of the time and waits for the terminal to catch up: a slow one gets fewer frames,
not a slower answer.
"""

import shutil
import sys
import time
from collections.abc import Callable, Sequence
from itertools import groupby

from rich.cells import cell_len

from clover_local.chat import Piece
from clover_local.cli import console
from clover_local.cli.heat import colour
from clover_local.cli.preferences import ThinkingView, Watch
from clover_local.cli.writer import Output, Throttle
from clover_local.decoding.events import PassDone, PromptProgress

DIM = "2"
PLAIN = ""
SAVE, RESTORE = "\x1b7", "\x1b8"
"""The cursor's place and style."""
ERASE_BELOW = "\x1b[J"

Span = tuple[str, str]
"""Text and its SGR style."""


class AnswerView:
    """Paints one answer."""

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        output: Output,
        *,
        mask_token_id: int,
        watch: Watch,
        thinking: ThinkingView = "show",
        throttle: Throttle | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._decode = decode
        self._output = output
        self._mask_token_id = mask_token_id
        self._watch = watch
        self._folds = thinking == "fold"
        self._throttle = throttle or Throttle()
        self._clock = clock
        self._mask = "░" if console.can_show("░") else "_"
        self._coloured = console.has_colour(sys.stdout)  # asked once: it is a call of the system
        self._size = _terminal_size()
        self._column = 0
        self._line_cells = 0
        self._painted = False
        self._was_thinking = False
        self._thought_since: float | None = None
        self._thought_tokens = 0
        self._confidence: dict[int, float] = {}

    def show_block(self, event: PassDone, *, thinking: bool = False) -> None:
        """Repaints the active block after a pass, if it is time; folded, a line in its place."""
        if thinking and self._folds:
            self._think(0)
            return
        if self._watch == "off":
            return
        if event.pass_number == 0:
            self._confidence.clear()
        self._confidence.update({fixed.row: fixed.confidence for fixed in event.fixed})
        self._paint(lambda: self._spans(event.tokens, text_style=DIM if thinking else PLAIN))

    def show_prompt(self, event: PromptProgress) -> None:
        """Says how far a long prompt is, in the place of the active block, if it is time."""
        if event.committed < event.total:
            text = f"reading the prompt: {event.committed} of {event.total} tokens"
            self._paint(lambda: [(text, DIM)])

    def add(self, piece: Piece) -> None:
        """Writes committed text; folded thinking is only counted."""
        if piece.thinking and self._folds:
            self._think(piece.tokens)
        else:
            self._throttle.work(lambda: self._write(piece))

    def close(self) -> None:
        """Ends the answer: no active block, and the cursor at the start of a line."""
        self._output.send(self._cleared() + self._summary() + ("\n" if self._column else ""))
        self._column = self._line_cells = 0

    def _think(self, tokens: int) -> None:
        """Counts `tokens` of folded thinking, and says how many there are, if it is time."""
        if self._thought_since is None:
            self._thought_since = self._clock()
        self._thought_tokens += tokens
        dots = "…" if console.can_show("…") else "..."
        count = f" {self._thought_tokens} tokens" if self._thought_tokens else ""
        self._paint(lambda: [(f"thinking{dots}{count}", DIM)])

    def _summary(self) -> str:
        """The line that stands for folded thinking which has ended."""
        if self._thought_since is None or not self._thought_tokens:
            return ""
        mark = "▸" if console.can_show("▸") else ">"
        tokens = f"{self._thought_tokens} token{'s' * (self._thought_tokens != 1)}"
        seconds = self._clock() - self._thought_since
        text = f"{mark} thought for {tokens}, {seconds:.1f} s (/thinking shows it)"
        before = "\n" if self._column else ""
        self._thought_since, self._thought_tokens = None, 0
        self._column = self._line_cells = 0
        return before + self._styled(text, DIM) + "\n"

    def _write(self, piece: Piece) -> None:
        self._look_at_size()
        before = self._cleared() + self._summary()
        text = console.printable(piece.text)
        if self._was_thinking and not piece.thinking:
            text = "\n" * (1 + bool(self._column)) + text
        self._was_thinking = piece.thinking
        self._column, self._line_cells = advance(
            text, self._column, self._line_cells, width=self._size[0]
        )
        style = DIM if piece.thinking else PLAIN
        self._output.send(before + self._styled(text, style))

    def _cleared(self) -> str:
        """What takes the active block off the terminal."""
        if not self._painted:
            return ""
        self._painted = False
        return ERASE_BELOW

    def _paint(self, spans: Callable[[], Sequence[Span]]) -> None:
        """Shows `spans` after the committed text, if it is time and the terminal has caught up."""
        if self._output.idle:
            self._throttle.paint(lambda: self._output.send(self._frame(spans())))

    def _frame(self, spans: Sequence[Span]) -> str:
        self._look_at_size()
        width, height = self._size
        before = self._cleared()
        if self._column >= width:  # the cursor waits at the right edge: take it to the next line
            before += " \r"
            self._column = 0
        rows, column, painted = 0, self._column, ""
        for text, style in spans:
            shown, column, rows = _fit(text, column, rows, width=width, height=height)
            painted += self._styled(shown, style)
        self._painted = True
        # Scroll first: the place that is saved would not scroll along.
        room = "\x1bD" * rows + (f"\x1b[{rows}A" if rows else "")
        return before + room + SAVE + painted + RESTORE

    def _spans(self, tokens: Sequence[int], *, text_style: str) -> list[Span]:
        """The active block in runs of one style; a mask is one glyph."""
        kinds = [self._kind(row, token, text_style) for row, token in enumerate(tokens)]
        spans: list[Span] = []
        for (masked, style), group in groupby(
            zip(tokens, kinds, strict=True), key=lambda pair: pair[1]
        ):
            run = [token for token, _ in group]
            spans.append((self._mask * len(run) if masked else self._decode(run), style))
        return spans

    def _kind(self, row: int, token: int, text_style: str) -> tuple[bool, str]:
        """Whether a row is masked, and its SGR style."""
        if token == self._mask_token_id:
            return True, DIM
        if self._watch != "heat":
            return False, text_style
        return False, colour(self._confidence.get(row, 1.0))

    def _styled(self, text: str, style: str) -> str:
        return f"\x1b[{style}m{text}\x1b[0m" if text and style and self._coloured else text

    def _look_at_size(self) -> None:
        """After a change of the width, where the cursor is if the terminal wrapped lines anew."""
        size = _terminal_size()
        if size[0] != self._size[0] and self._column:
            # At the very edge it may wait there or not: one less is harmless in both cases.
            self._column = max(1, min(self._line_cells % size[0], size[0] - 1))
        self._size = size


def _terminal_size() -> tuple[int, int]:
    columns, lines = shutil.get_terminal_size()
    return max(columns, 1), max(lines, 3)


def step(character: str, column: int, width: int) -> tuple[int, int]:
    """(column, lines down) of the cursor after `character`; at column == width it waits there."""
    if character == "\n":
        return 0, 1
    if character == "\t":
        return min((column // 8 + 1) * 8, width - 1), 0
    cells = cell_len(character)
    return (cells, 1) if column + cells > width else (column + cells, 0)


def advance(text: str, column: int, line_cells: int, *, width: int) -> tuple[int, int]:
    """(column, cells since the last newline) of the cursor after `text`."""
    if text.isascii() and "\t" not in text:  # a cell each: no need to look at every one
        for number, line in enumerate(text.split("\n")):
            if number:
                column = line_cells = 0
            if line:
                column = (column + len(line) - 1) % width + 1
                line_cells += len(line)
        return column, line_cells
    for character in text:
        before = column
        column, down = step(character, column, width)
        line_cells += column if down else column - before
        if character == "\n":
            line_cells = 0
    return column, line_cells


def _fit(text: str, column: int, rows: int, *, width: int, height: int) -> tuple[str, int, int]:
    """As much of `text` as leaves a line free on the terminal, and (column, rows) after it."""
    shown = ""
    for character in console.printable(text):
        next_column, down = step(character, column, width)
        if rows + down > height - 2:
            return shown, width, rows  # nothing else fits either
        column, rows, shown = next_column, rows + down, shown + character
    return shown, column, rows
