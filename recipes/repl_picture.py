"""Draws docs/repl.svg: a chat with the demo model in a real terminal, as a moving picture.

    python recipes/repl_picture.py [--out docs/repl.svg] [--slower 6]

The installed `clover-local chat` runs in a pseudo-terminal and is typed at like by a person; a
terminal emulator (pyte) keeps what stood on the screen after each piece of output. While it answers
the program gets short slices of time, as on a slower machine, so that every pass is painted; those
frames are then shown slower still, and the picture says so. It has no script and no font of its
own: its frames lie side by side, and CSS moves from one to the next.
"""

import argparse
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from html import escape
from itertools import groupby
from pathlib import Path

import pexpect
import pyte

COLUMNS, ROWS = 96, 20
TYPED = (
    "/watch heat",
    "/set threshold 0.997",
    "What is 22 + 23?",
    "Write a function check_all(items) that counts the items larger than 7.",
)
READY = "\x1b[?2004h"  # the input line asks for bracketed paste when it is ready
ANSWERED = "tok/s"  # of the status line
SLICE, PAUSE = 0.008, 0.02  # seconds that the program runs and rests while it answers
TYPING = 0.2  # seconds to wait for the echo of a key
LAST_FRAME = 4.0  # seconds that the end stays
LONGEST = 1.2  # seconds of any other frame
SHORTEST = 0.03  # seconds: what stood for less is left out
CAPTION = "in slow motion, and so are the times of the status line"
CELL, LINE, EDGE = 8.4, 19, 16  # pixels: width of a character, height of a line, margin
DARK = {
    "default": "#d7dde3", "background": "#161b22", "black": "#161b22", "red": "#ff7b72",
    "green": "#7ee787", "brown": "#e3b341", "blue": "#79c0ff", "magenta": "#d2a8ff",
    "cyan": "#76e3ea", "white": "#d7dde3", "brightblack": "#8b949e",
}  # fmt: skip

Style = tuple[str, str, bool]
"""Colour, background and whether bold."""
Line = tuple[tuple[int, str, Style], ...]
"""Runs of one style: column, text, style."""


@dataclass(frozen=True)
class Frame:
    """What stood on the screen from `at` on, in seconds; `slow`: while an answer was made."""

    at: float
    lines: tuple[Line, ...]
    slow: bool


class Terminal(pyte.Screen):
    """A screen on which dim text has a colour, as pyte knows no dim."""

    def select_graphic_rendition(self, *attrs: int, private: bool = False) -> None:
        """Dim is the colour bright black here; private sequences are about keys, not colours."""
        if not private:
            super().select_graphic_rendition(*((90,) if attrs == (2,) else attrs))


def main() -> int:
    """Records the chat, writes the picture, and prints how large it is."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("docs/repl.svg"))
    parser.add_argument("--slower", type=float, default=6.0, help="while masks fill; default 6")
    arguments = parser.parse_args()
    frames = list(timed(record(), slower=arguments.slower))
    arguments.out.write_text(drawn(frames), encoding="utf-8")
    print(f"{arguments.out}: {len(frames)} frames, {arguments.out.stat().st_size / 1000:.0f} kB")
    return 0


def record() -> list[Frame]:
    """What a person sees who asks the questions."""
    screen = Terminal(COLUMNS, ROWS)
    stream = pyte.Stream(screen)
    frames: list[Frame] = []
    with tempfile.TemporaryDirectory() as home:
        child = pexpect.spawn(
            str(Path(sys.executable).with_name("clover-local")),
            ["chat", "demo"],
            env={**os.environ, "XDG_STATE_HOME": home, "XDG_CONFIG_HOME": home,
                 "TERM": "xterm-256color", "PROMPT_TOOLKIT_NO_CPR": "1"},
            encoding="utf-8",
            dimensions=(ROWS, COLUMNS),
            timeout=60,
        )  # fmt: skip
        stream.feed("$ clover-local chat demo\r\n")
        unread = ""

        def follow(*, slow: bool, patience: float) -> str:
            """What the program writes next, on the screen too."""
            piece: str = child.read_nonblocking(4096, timeout=patience)
            stream.feed(piece)
            frames.append(Frame(time.monotonic(), snapshot(screen), slow))
            return piece

        def wait_for(word: str, *, slow: bool = False) -> None:
            nonlocal unread
            while word not in unread:
                if not slow:
                    unread += follow(slow=False, patience=60)
                    continue
                child.kill(signal.SIGCONT)
                time.sleep(SLICE)
                child.kill(signal.SIGSTOP)
                time.sleep(PAUSE)
                with suppress(pexpect.TIMEOUT):
                    unread += follow(slow=True, patience=0)
            child.kill(signal.SIGCONT)
            unread = unread.partition(word)[2]

        wait_for(READY)
        for line in TYPED:
            for letter in line:
                child.send(letter)
                with suppress(pexpect.TIMEOUT):
                    unread += follow(slow=False, patience=TYPING)
            child.send("\r")
            if not line.startswith("/"):
                wait_for(ANSWERED, slow=True)
            wait_for(READY)
        child.close(force=True)
    return frames


def snapshot(screen: pyte.Screen) -> tuple[Line, ...]:
    """The lines of a screen."""
    lines = []
    for row in range(screen.lines):
        cells = [screen.buffer[row][column] for column in range(screen.columns)]
        runs: list[tuple[int, str, Style]] = []
        column = 0
        for style, group in groupby(cells, key=style_of):
            text = "".join(cell.data for cell in group)
            runs.append((column, text, style))
            column += len(text)
        lines.append(tuple(run for run in runs if run[1].strip() or run[2][1] != "background"))
    return tuple(lines)


def style_of(cell: pyte.screens.Char) -> Style:
    """The style of a character on the screen."""
    colour = cell.fg if cell.fg in DARK else "default" if cell.fg == "default" else f"#{cell.fg}"
    behind = "background" if cell.bg == "default" else cell.bg if cell.bg in DARK else f"#{cell.bg}"
    if cell.reverse:
        colour, behind = behind, colour
    return colour, behind, cell.bold


def timed(frames: list[Frame], *, slower: float) -> Iterator[Frame]:
    """Frames that differ, at the times at which the picture shows them."""
    kept: list[Frame] = []
    for frame in frames:
        if kept and frame.lines == kept[-1].lines:
            continue
        if kept and not kept[-1].slow and frame.at - kept[-1].at < SHORTEST:
            kept[-1] = replace(frame, at=kept[-1].at)
        else:
            kept.append(frame)
    at = 0.0
    for frame, following in zip(kept, [*kept[1:], None], strict=True):
        yield replace(frame, at=at)
        length = LAST_FRAME if following is None else following.at - frame.at
        at += min(max(length * (slower if frame.slow else 1.0), SHORTEST), LONGEST)


def drawn(frames: list[Frame]) -> str:
    """The picture: every line once, frames of references to lines, and the times of the frames."""
    width, height = COLUMNS * CELL + 2 * EDGE, ROWS * LINE + 2 * EDGE + 22
    length = frames[-1].at + LAST_FRAME
    lines = sorted({line for frame in frames for line in frame.lines if line})
    names = {line: f"l{number}" for number, line in enumerate(lines)}
    keys = "".join(
        f"{100 * frame.at / length:.2f}%{{transform:translateX({-number * width:.0f}px)}}"
        for number, frame in enumerate(frames)
    )
    last = f"transform:translateX({-(len(frames) - 1) * width:.0f}px)"
    shown = "".join(
        f'<g transform="translate({number * width:.0f})">'
        + "".join(
            f'<use href="#{names[line]}" y="{row * LINE}"/>'
            for row, line in enumerate(frame.lines)
            if line
        )
        + "</g>\n"
        for number, frame in enumerate(frames)
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}" '
        f'width="{width:.0f}" height="{height}" role="img">\n'
        "<title>A chat with the demo model: masks fill, then the status line</title>\n"
        "<style>text{font:14px ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',"
        f"monospace;white-space:pre}}#film{{animation:film {length:.2f}s step-end infinite;{last}}}"
        f"@keyframes film{{{keys}100%{{{last}}}}}"
        "@media (prefers-reduced-motion:reduce){#film{animation:none}}</style>\n"
        f'<defs><clipPath id="glass"><rect width="{width:.0f}" height="{height}" rx="9"/>'
        f"</clipPath>\n{''.join(_line(names[line], line) for line in lines)}</defs>\n"
        f'<rect width="{width:.0f}" height="{height}" rx="9" fill="{DARK["background"]}"/>\n'
        f'<g clip-path="url(#glass)"><g id="film">\n{shown}</g></g>\n'
        f'<text x="{width - EDGE:.0f}" y="{height - 10}" text-anchor="end" '
        f'style="font-size:11px" fill="{DARK["brightblack"]}">{CAPTION}</text>\n</svg>\n'
    )


def _line(name: str, line: Line) -> str:
    """One line of the screen; `textLength` keeps the columns whatever the font."""
    parts = []
    for column, text, (colour, behind, bold) in line:
        x, width = EDGE + column * CELL, len(text) * CELL
        if behind != "background":
            fill = DARK.get(behind, behind)
            parts.append(
                f'<rect x="{x:.1f}" y="{EDGE}" width="{width:.1f}" height="{LINE}" fill="{fill}"/>'
            )
        start = len(text) - len(text.lstrip())
        word = text.strip()
        if word:
            weight = ' font-weight="bold"' if bold else ""
            parts.append(
                f'<text x="{x + start * CELL:.1f}" y="{EDGE + 14}" '
                f'textLength="{len(word) * CELL:.1f}" lengthAdjust="spacingAndGlyphs" '
                f'fill="{DARK.get(colour, colour)}"{weight}>{escape(word)}</text>'
            )
    return f'<g id="{name}">{"".join(parts)}</g>\n'


if __name__ == "__main__":
    sys.exit(main())
