"""The input line of a terminal, by prompt_toolkit: history, completion, several lines."""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import CompleteEvent, Completer, Completion
from prompt_toolkit.document import Document
from prompt_toolkit.filters import is_searching
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

from clover_local.cli import console, failures
from clover_local.cli.editor import edited
from clover_local.cli.lines import unquote
from clover_local.errors import CloverError
from clover_local.files import require_file

Choices = Mapping[str, Sequence[str] | Callable[[str], Iterable[str]]]
"""Per command the values that may follow it, or what finds those that begin with a text."""


class CommandCompleter(Completer):
    """Completes slash commands and their arguments, where these are known or can be found."""

    def __init__(self, choices: Choices) -> None:
        self._choices = choices

    def get_completions(
        self, document: Document, complete_event: CompleteEvent
    ) -> Iterable[Completion]:
        text = document.text_before_cursor
        if not text.startswith("/"):
            return
        command, space, argument = text.partition(" ")
        values = self._choices.get(command, ()) if space else tuple(self._choices)
        typed = argument if space else command
        done = len(typed) - len(typed.rpartition(" ")[2])  # words before the one at the cursor
        for candidate in values(typed) if callable(values) else values:
            if candidate.startswith(typed):
                shown = candidate[done:]
                yield Completion(candidate, start_position=-len(typed), display=shown)


class LineEditor:
    """Reads questions from a terminal."""

    def __init__(self, choices: Choices) -> None:
        self._session: PromptSession[str] = PromptSession(
            history=_history(),
            completer=CommandCompleter(choices),
            complete_while_typing=False,
            multiline=True,
            key_bindings=_bindings(),
            prompt_continuation="  ",
        )

    def read(self) -> str:
        """The next question.

        Raises:
            KeyboardInterrupt: Ctrl-C.
            EOFError: Ctrl-D on an empty line.
        """
        text = self._session.prompt("> ")
        return unquote(text) or ""


class _TolerantHistory(FileHistory):
    """A history whose file may fail: what cannot be written is remembered until the end only."""

    def store_string(self, string: str) -> None:
        with suppress(OSError):
            super().store_string(string.encode(errors="replace").decode())


def history_path() -> Path:
    """Where questions are kept: `$XDG_STATE_HOME/clover-local/history`."""
    state = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    return Path(state) / "clover-local" / "history"


def _history() -> History:
    path = history_path()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o600)
        require_file(path)  # a pipe would block, a device might never end
        path.open("a+").close()
    except OSError as error:
        console.note(f"note: no history is kept: {path}: {error.strerror}")
        return InMemoryHistory()
    return _TolerantHistory(path)


def _bindings() -> KeyBindings:
    bindings = KeyBindings()

    @bindings.add("enter", filter=~is_searching)
    def _(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if unquote(buffer.text) is None:
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @bindings.add("escape", "enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    @bindings.add("c-o")
    def _(event: KeyPressEvent) -> None:
        # Not as a task of its own: keys that are typed ahead come after the editor.
        app, buffer = event.app, event.current_buffer
        app.renderer.erase()
        with app.input.detach(), app.input.cooked_mode():
            buffer.document = Document(_edited(buffer.text))
        app.renderer.reset()
        app.renderer.request_absolute_cursor_position()

    return bindings


def _edited(text: str) -> str:
    """`text` as the user's editor leaves it; as it was, where that fails."""
    try:
        return edited(text)
    except (CloverError, OSError) as error:  # a full disk as well: the line is not lost
        failures.report(error)
        return text
