"""The loop of `clover-local chat`: a line in, a command or an answer out."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

from clover_local.chat import AnswerStream, Piece
from clover_local.cli import commands, console, failures
from clover_local.cli.interrupt import follow, interrupts_dropped, interrupts_heard
from clover_local.cli.lines import questions, require_unicode
from clover_local.cli.live import AnswerView
from clover_local.cli.status import advice_line, ending, status_line
from clover_local.cli.talk import ChatState
from clover_local.cli.writer import Writer
from clover_local.decoding.auto.spectator import Spectator
from clover_local.decoding.events import Event, PassDone, PromptProgress


def converse(chat: ChatState) -> None:
    """Talks with a person at a terminal until `/exit` or Ctrl-D; an error ends only its turn."""
    from clover_local.cli.line_editor import LineEditor

    chat.show = show_live
    editor = LineEditor({name: command.choices for name, command in commands.COMMANDS.items()})
    with interrupts_dropped():  # a Ctrl-C between two lines has nothing to stop
        while True:
            try:
                line = editor.read()
                with interrupts_heard():
                    _take(line, chat, "what was typed")
            except KeyboardInterrupt:
                continue  # the line is dropped, or what it began
            except EOFError:
                return
            except Exception as error:  # also a full disk or memory: the conversation lives on
                failures.report(error)


def _take(line: str, chat: ChatState, source: str) -> None:
    """Runs the command, or answers the question, that a line is."""
    require_unicode(line, source)
    if line.startswith("/"):
        commands.execute(line, chat)
    elif line.strip():
        chat.answer(chat.ask(line))


def converse_plainly(chat: ChatState) -> bool:
    """Answers the lines of stdin in plain text; returns False when one of them failed.

    A person who types them sees a prompt for each, and ends an answer by Ctrl-C.

    Raises:
        KeyboardInterrupt: Ctrl-C, which ends the program where nobody types.
    """
    all_well, chat.show = True, show_plainly
    person = sys.stdin.isatty()
    before_line = (lambda: console.aside("> ")) if person else (lambda: None)
    quietly, heard = (
        (interrupts_dropped, interrupts_heard) if person else (nullcontext, nullcontext)
    )
    lines = questions(sys.stdin.buffer, before_line)
    with quietly():
        while True:
            line = None
            try:
                with heard():
                    line = next(lines, None)
                    if line is None:
                        return all_well
                    _take(line, chat, "stdin")
            except EOFError:
                return all_well
            except KeyboardInterrupt:
                if not person:
                    raise
                if line is None:  # what was typed of it is dropped
                    console.aside("\n")
                    lines = questions(sys.stdin.buffer, before_line)
                else:
                    console.note("stopped")
            except Exception as error:  # the lines after it are answered all the same
                failures.report(error)
                all_well = False


def show_live(chat: ChatState, events: AnswerStream) -> None:
    """One answer with the active block in view, and a line on what it cost."""
    generator = chat.conversation.generator
    if generator.spectator is None:
        generator.spectator = Spectator(generator.auto)
    with hidden_keys(), Writer(console.write_unbuffered) as writer:
        view = AnswerView(
            chat.conversation.tokenizer.decode,
            writer,
            mask_token_id=chat.resolved.settings.mask_token_id,
            watch=chat.watch,
            thinking=chat.thinking,
        )

        def show(event: Event | Piece) -> None:
            if isinstance(event, Piece):
                view.add(event)
            elif isinstance(event, PassDone):
                view.show_block(event, thinking=chat.conversation.is_thinking)
            elif isinstance(event, PromptProgress):
                view.show_prompt(event)

        try:
            follow(events, show)
        finally:
            view.close()
    chat.last = generator.result
    if chat.last is not None:
        console.text(status_line(chat.last), dim=True)
        faster = generator.advice() if chat.last.finish_reason != "cancelled" else None
        if faster is not None:
            console.text(advice_line(faster), dim=True)


def answer_plainly(chat: ChatState, question: str) -> None:
    """Asks, and shows the answer plainly."""
    show_plainly(chat, chat.ask(question))


def show_plainly(chat: ChatState, events: AnswerStream) -> None:
    """One answer on stdout as it is committed; thinking goes to stderr.

    Raises:
        KeyboardInterrupt: Ctrl-C.
    """

    def show(event: Event | Piece) -> None:
        if isinstance(event, Piece) and event.thinking:
            console.aside(event.text)
        elif isinstance(event, Piece):
            console.text(event.text, end="")

    finished = follow(events, show)
    console.text("")
    chat.last = chat.conversation.generator.result
    if not finished:
        raise KeyboardInterrupt
    if chat.last is not None and ending(chat.last.finish_reason):
        console.note(status_line(chat.last))


@contextmanager
def hidden_keys() -> Iterator[None]:
    """Within it, the terminal does not echo what is typed: that would spoil the view."""
    restore = _stop_echo()
    try:
        yield
    finally:
        restore()


def _stop_echo() -> Callable[[], None]:
    try:
        import termios  # not on Windows
    except ImportError:
        return lambda: None
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    without_echo = [*before]
    without_echo[3] &= ~termios.ECHO
    termios.tcsetattr(descriptor, termios.TCSADRAIN, without_echo)
    return lambda: termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
