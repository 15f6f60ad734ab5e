"""Slash commands that act on the last turn: /regen, /undo, /edit, /read, /copy.

A turn is made again from the state before it: the conversation is rendered anew, and the sequence
state goes back to the checkpoint where the last question begins.
"""

import base64
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from clover_local.cli import console
from clover_local.cli.editor import edited
from clover_local.cli.prompts import decode
from clover_local.cli.talk import ChatState
from clover_local.decoding.settings import Place
from clover_local.errors import SettingsError
from clover_local.files import require_file, user_path

LARGEST_FILE = 10_000_000  # bytes of a text to read
LARGEST_COPY = 74_994
"""Bytes that every terminal with OSC 52 takes (xterm's limit)."""


def regen(chat: ChatState, argument: str) -> None:
    """Answers the last question again: where tokens are drawn, with the next seed."""
    events = chat.conversation.ask_again()
    settings = chat.resolved.settings
    if chat.conversation.messages and settings.temperature > 0:
        seed = (settings.seed + 1) % 2**64
        chat.use(chat.resolved.with_values({"seed": seed}, source=Place.REGEN))
        console.note(f"seed {seed}")
    elif chat.conversation.messages:
        console.note("note: at temperature 0 only a changed setting changes the answer")
    chat.answer(events)


def undo(chat: ChatState, argument: str) -> None:
    """Takes the last question and its answer back."""
    if not chat.conversation.messages:
        raise SettingsError("there is no question left to take back")
    question = " ".join(chat.conversation.undo().split())
    chat.last = None
    console.text(f"taken back: {question if len(question) <= 60 else question[:60] + '...'}")


def edit(chat: ChatState, argument: str) -> None:
    """Opens the last question in the editor, and answers it as it is then."""
    before = chat.conversation.last_question
    after = edited(before)
    if not after.strip() or after == before:
        console.note("the question is as it was; nothing was asked")
        return
    chat.answer(chat.conversation.ask_again(after))


def read(chat: ChatState, argument: str) -> None:
    """Attaches a file's text to the next question; `none` takes it off again."""
    if argument == "none":
        chat.attached = ""
    elif argument:
        text = _text_of(user_path(argument))
        chat.attached = f"{chat.attached}\n\n{text}" if chat.attached else text
        console.text(f"{argument}: {len(text):,} characters go before the next question")
        return
    size = f"{len(chat.attached):,} characters go before the next question"
    console.text(size if chat.attached else "nothing goes before the next question: /read FILE")


def _text_of(path: Path) -> str:
    try:
        require_file(path)
        size = path.stat().st_size
        if size > LARGEST_FILE:
            raise SettingsError(f"{path} has {size:,} bytes: /read takes at most {LARGEST_FILE:,}")
        text = decode(path.read_bytes(), str(path)).rstrip("\r\n")
    except OSError as error:
        raise SettingsError(
            f"{path} cannot be read ({error.strerror}): pass another file"
        ) from None
    if not text.strip():
        raise SettingsError(f"{path} is empty: pass a file with text")
    return text


def copy(chat: ChatState, argument: str) -> None:
    """Puts the last answer on the clipboard, by the terminal's sequence OSC 52."""
    answer = chat.conversation.last_answer.encode(errors="replace")
    if not console.is_terminal(sys.stdout):
        raise SettingsError("/copy needs a terminal: it is what holds the clipboard")
    console.write(f"\x1b]52;c;{base64.b64encode(answer).decode()}\x07")
    console.text(f"copied {len(answer):,} bytes, if this terminal allows it (OSC 52)")
    if len(answer) > LARGEST_COPY:
        console.note(f"note: some terminals copy at most {LARGEST_COPY:,} bytes")


def paths(typed: str) -> Iterator[str]:
    """The files and folders whose path begins with `typed`, for completion."""
    folder, _, name = typed.rpartition("/")
    try:
        found = sorted(user_path(f"{folder}/" if "/" in typed else ".").iterdir())
    except (SettingsError, OSError):
        return
    for path in found:
        hidden = path.name.startswith(".") and not name.startswith(".")
        if path.name.startswith(name) and not hidden:
            yield typed[: len(typed) - len(name)] + path.name + ("/" if os.path.isdir(path) else "")
