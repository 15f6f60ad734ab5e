"""How an answer appears on a terminal: committed text scrolls, the active block is repainted.

Committed text is written once, unwrapped, so that it can be copied from the terminal. The active
block follows it on the same line; after each painting the cursor returns to where the committed
text ends. Painting keeps to a small share of the time (`Throttle`): a slow terminal gets fewer
frames, not a slower answer.
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
from clover_local.decoding.events import PassDone, PromptProgress

DIM = "2"
PLAIN = ""

Span = tuple[str, str]
"""Text and its SGR style."""


class Throttle:
    """Says when to paint: at most every `interval` seconds, and at most 1/20 of the time."""

    def __init__(
        self, *, interval: float = 0.05, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._interval = interval
        self._clock = clock
        self._next = clock()

    def run(self, paint: Callable[[], None]) -> None:
        """Calls `paint` if it is time."""
        started = self._clock()
        if started < self._next:
            return
        paint()
        ended = self._clock()
        self._next = ended + max(self._interval, 20 * (ended - started))


class AnswerView:
    """Paints one answer."""

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        *,
        mask_token_id: int,
        watch: str,
        throttle: Throttle | None = None,
    ) -> None:
        self._decode = decode
        self._mask_token_id = mask_token_id
        self._watch = watch
        self._throttle = throttle or Throttle()
        self._mask = "░" if console.can_show("░") else "_"
        self._column = 0
        self._painted = False
        self._was_thinking = False
        self._confidence: dict[int, float] = {}

    def show_block(self, event: PassDone) -> None:
        """Repaints the active block after a pass, if it is time."""
        if self._watch == "off":
            return
        if event.pass_number == 0:
            self._confidence.clear()
        self._confidence.update({fixed.row: fixed.confidence for fixed in event.fixed})
        self._throttle.run(lambda: self._paint(self._spans(event.tokens)))

    def show_prompt(self, event: PromptProgress) -> None:
        """Says how far a long prompt is, in the place of the active block, if it is time."""
        if event.committed < event.total:
            text = f"reading the prompt: {event.committed} of {event.total} tokens"
            self._throttle.run(lambda: self._paint([(text, DIM)]))

    def add(self, piece: Piece) -> None:
        """Writes committed text."""
        cleared = self._cleared()
        text = console.printable(piece.text)
        if self._was_thinking and not piece.thinking:
            text = "\n" * (1 + bool(self._column)) + text
        self._was_thinking = piece.thinking
        width = self._size()[0]
        for character in text:
            self._column, _ = step(character, self._column, width)
        console.write(cleared + console.style(text, DIM if piece.thinking else PLAIN, sys.stdout))

    def close(self) -> None:
        """Ends the answer: no active block, and the cursor at the start of a line."""
        console.write(self._cleared() + ("\n" if self._column else ""))
        self._column = 0

    def _cleared(self) -> str:
        """What takes the active block off the terminal."""
        if not self._painted:
            return ""
        self._painted = False
        return _to_column(self._column) + "\x1b[J"

    def _paint(self, spans: Sequence[Span]) -> None:
        width, height = self._size()
        frame = [self._cleared()]
        if self._column >= width:  # the cursor waits at the right edge: take it to the next line
            frame.append(" \r")
            self._column = 0
        rows = 0
        column = self._column
        for text, style in spans:
            shown, column, rows = _fit(text, column, rows, width=width, height=height)
            frame.append(console.style(shown, style, sys.stdout))
        frame.append(f"\x1b[{rows}A" if rows else "")
        frame.append(_to_column(self._column))
        console.write("".join(frame))
        self._painted = True

    def _spans(self, tokens: Sequence[int]) -> list[Span]:
        """The active block in runs of one style; a mask is one glyph."""
        styles = [self._style(row, token) for row, token in enumerate(tokens)]
        spans: list[Span] = []
        for style, group in groupby(zip(tokens, styles, strict=True), key=lambda pair: pair[1]):
            run = [token for token, _ in group]
            masked = run[0] == self._mask_token_id
            spans.append((self._mask * len(run), DIM) if masked else (self._decode(run), style))
        return spans

    def _style(self, row: int, token: int) -> str:
        """SGR style of a row; a mask never shares its style with text."""
        if token == self._mask_token_id:
            return DIM
        if self._watch != "heat":
            return PLAIN
        return colour(self._confidence.get(row, 1.0))

    def _size(self) -> tuple[int, int]:
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


def _fit(text: str, column: int, rows: int, *, width: int, height: int) -> tuple[str, int, int]:
    """As much of `text` as leaves a line free on the terminal, and (column, rows) after it."""
    shown = ""
    for character in console.printable(text):
        next_column, down = step(character, column, width)
        if rows + down > height - 2:
            return shown, width, rows  # nothing else fits either
        column, rows, shown = next_column, rows + down, shown + character
    return shown, column, rows


def _to_column(column: int) -> str:
    return f"\r\x1b[{column}C" if column else "\r"
