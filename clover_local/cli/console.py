"""The one place that writes to the user: results to stdout, progress, notes and errors to stderr.

Text for a terminal is stripped of control characters (a model may write any bytes, among them
escape sequences); text for a pipe or a file goes out as it is. rich is imported only when a table
meets a terminal.
"""

import io
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TextIO

OUTPUT_CLOSED = 141
"""Exit code when the reader of stdout has gone (`| head -1`): 128 + SIGPIPE, as of other tools."""

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_LONGEST_ERROR = 2000
_PROGRESS_INTERVAL = 0.1  # seconds


@dataclass
class _Sink:
    quiet: bool = False


_sink = _Sink()


def set_quiet(quiet: bool) -> None:
    """Whether notes and progress are dropped from now on; errors and results never are."""
    _sink.quiet = quiet


def is_terminal(stream: TextIO) -> bool:
    """Whether a person looks at `stream` and it can be repainted."""
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def has_colour(stream: TextIO) -> bool:
    """Whether to write colours to `stream`: a terminal, and NO_COLOR (no-color.org) not set."""
    return is_terminal(stream) and not os.environ.get("NO_COLOR")


def style(text: str, code: str, stream: TextIO) -> str:
    """`text` in the SGR style `code` (`2` = dim, `1` = bold), where `stream` shows colours."""
    return f"\x1b[{code}m{text}\x1b[0m" if text and code and has_colour(stream) else text


def printable(text: str) -> str:
    """`text` without control characters other than newline and tab."""
    return _CONTROL.sub("", text)


def write(text: str) -> None:
    """Writes to stdout as it is and flushes.

    Raises:
        SystemExit: whoever read stdout has closed it; nothing more can be shown.
    """
    _write(text, sys.stdout)


def write_unbuffered(text: str) -> None:
    """As `write`, past the buffer of stdout, whose lock a thread that waits here would hold.

    What was written to stdout before has to be flushed.
    """
    descriptor = _descriptor(sys.stdout)
    if descriptor is None:
        _write(text, sys.stdout)
        return
    encoded = text.encode(sys.stdout.encoding, errors=sys.stdout.errors or "replace")

    def put(left: memoryview) -> None:
        while left:
            left = left[os.write(descriptor, left) :]

    _carry(lambda: put(memoryview(encoded)), sys.stdout)


def _descriptor(stream: TextIO) -> int | None:
    """Where the bytes of `stream` go as they are; None: it changes them, or has no such place."""
    if os.name != "posix":
        return None  # Windows translates line ends, and what a console gets
    try:
        return stream.fileno()
    except io.UnsupportedOperation:
        return None


def _write(text: str, stream: TextIO) -> None:
    def put() -> None:
        stream.write(text)
        stream.flush()

    _carry(put, stream)


def _carry(put: Callable[[], None], stream: TextIO) -> None:
    """Calls `put`, which writes to `stream`; ends the program if nobody reads it any more."""
    try:
        put()
    except BrokenPipeError:
        abandon(stream)
        raise SystemExit(OUTPUT_CLOSED) from None
    except OSError:
        if stream is not sys.stderr:
            raise
        abandon(stream)  # there is no place left to complain


def abandon(stream: TextIO) -> None:
    """Points `stream` at nothing, so that what is still buffered raises no second error at exit."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stream.fileno())
    os.close(null)


def text(text: str, *, end: str = "\n", dim: bool = False) -> None:
    """A result, or a piece of one."""
    if is_terminal(sys.stdout):
        text = printable(text)
    write((style(text, "2", sys.stdout) if dim else text) + end)


def aside(text: str) -> None:
    """Text to stderr as it comes, next to a result and no part of it; not with `--quiet`."""
    if not _sink.quiet:
        _write(style(printable(text), "2", sys.stderr), sys.stderr)


def print_json(value: object) -> None:
    """A result as one line of JSON."""
    text(json.dumps(value, ensure_ascii=not _encodes(sys.stdout, "é→😀")))


def note(message: str) -> None:
    """One line to stderr that is no error; not with `--quiet`."""
    if not _sink.quiet:
        _write(style(printable(message), "2", sys.stderr) + "\n", sys.stderr)


def hint(pieces: Sequence[tuple[str, str]]) -> None:
    """One line to stderr of pieces with SGR styles of their own; not with `--quiet`."""
    if not _sink.quiet:
        _write("".join(style(text, code, sys.stderr) for text, code in pieces) + "\n", sys.stderr)


def error(message: str) -> None:
    """One line to stderr, with or without `--quiet`; a very long one loses its middle."""
    line = " ".join(printable(message).split())
    if len(line) > _LONGEST_ERROR:
        half = _LONGEST_ERROR // 2
        line = f"{line[:half]} ... {line[-half:]}"  # the remedy stands at the end
    _write(f"{style('error:', '1;31', sys.stderr)} {line}\n", sys.stderr)


def show_table(
    title: str, rows: Sequence[Sequence[object]], *, stream: TextIO | None = None
) -> None:
    """Rows of equal length in aligned columns under a title, to stdout unless said otherwise."""
    stream = stream or sys.stdout
    cells = [[printable(str(cell)) for cell in row] for row in rows]
    if is_terminal(stream):
        _write(_rich_table(title, cells, stream), stream)
        return
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in cells]
    _write("\n".join([title, *(f"  {line}" for line in lines)]) + "\n", stream)


def _rich_table(title: str, cells: Sequence[Sequence[str]], stream: TextIO) -> str:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    for index in range(len(cells[0]) if cells else 0):
        table.add_column(style="bold" if index == 0 else "", overflow="fold", no_wrap=index == 0)
    for row in cells:
        table.add_row(*map(Text, row))
    console = Console(file=stream, highlight=False)
    with console.capture() as capture:
        console.print(Text(title, style="dim"))
        console.print(table)
    return capture.get()


def can_show(glyphs: str) -> bool:
    """Whether stdout's encoding has these characters."""
    return _encodes(sys.stdout, glyphs)


def _encodes(stream: TextIO, glyphs: str) -> bool:
    try:
        glyphs.encode(stream.encoding or "ascii")
    except UnicodeEncodeError:
        return False
    return True


def duration(seconds: float) -> str:
    """A time for a reader: `45 s`, `12 min`, `3.5 h`."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


class ProgressLine:
    """A line on stderr that says how far a work is; of a terminal only."""

    def __init__(self, label: str) -> None:
        self._label = label
        self._shown = not _sink.quiet and is_terminal(sys.stderr)
        self._started = time.monotonic()
        self._painted = -_PROGRESS_INTERVAL

    def __call__(self, done: int, total: int, *, label: str | None = None) -> None:
        """Shows the share, if it is time.

        Args:
            done: in any unit.
            label: another work, which goes on in the midst of this one: of it no time is foretold.
        """
        now = time.monotonic()
        if not self._shown or now - self._painted < _PROGRESS_INTERVAL:
            return
        self._painted = now
        left = ""
        if 0 < done < total and label is None:
            left = f", {duration((now - self._started) * (total - done) / done)} left"
        share = f" {100 * done / total:.0f} %{left}" if total else ""
        _write(f"\r\x1b[K{label or self._label}{share}", sys.stderr)

    def note(self, message: str) -> None:
        """As `note`, in the place of the line, which comes back below it."""
        self.clear()
        note(message)

    def clear(self) -> None:
        """Takes the line away."""
        if self._shown:
            _write("\r\x1b[K", sys.stderr)


@contextmanager
def progress(label: str) -> Iterator[ProgressLine]:
    """A progress line with the time left, which is gone at the end.

    Where stderr is no terminal the label is printed once.
    """
    line = ProgressLine(label)
    if not is_terminal(sys.stderr):
        note(f"{label} ...")
    line(0, 0)
    try:
        yield line
    finally:
        line.clear()
