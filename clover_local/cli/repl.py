"""The loop of `clover-local chat`: a line in, a command or an answer out."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from clover_local.chat import AnswerStream, Piece
from clover_local.cli import commands, console, failures
from clover_local.cli.interrupt import follow
from clover_local.cli.lines import questions, require_unicode
from clover_local.cli.live import AnswerView
from clover_local.cli.status import advice_line, ending, status_line
from clover_local.cli.talk import ChatState
from clover_local.cli.writer import Writer
from clover_local.decoding.auto.spectator import Spectator
from clover_local.decoding.events import Event, PassDone, PromptProgress
from clover_local.errors import CloverError


def converse(chat: ChatState) -> None:
    """Talks with a person at a terminal until `/exit` or Ctrl-D; an error ends only its turn."""
    from clover_local.cli.line_editor import LineEditor

    chat.show = show_live
    editor = LineEditor({name: command.choices for name, command in commands.COMMANDS.items()})
    while True:
        try:
            line = editor.read()
        except KeyboardInterrupt:
            continue  # the line is dropped
        except EOFError:
            return
        try:
            require_unicode(line, "what was typed")
            if line.startswith("/"):
                commands.execute(line, chat)
            elif line.strip():
                chat.answer(chat.conversation.ask(chat.question(line)))
        except KeyboardInterrupt:
            continue
        except EOFError:
            return
        except Exception as error:  # also a full disk or memory: the conversation lives on
            failures.report(error)


def converse_plainly(chat: ChatState) -> bool:
    """Answers the lines of stdin in plain text; returns False when one of them failed.

    A person who types them sees a prompt for each, and ends an answer by Ctrl-C.

    Raises:
        KeyboardInterrupt: Ctrl-C, which ends the program where nobody types.
    """
    all_well, chat.show = True, show_plainly
    person = sys.stdin.isatty()
    before_line = (lambda: console.aside("> ")) if person else (lambda: None)
    for line in questions(sys.stdin.buffer, before_line):
        try:
            require_unicode(line, "stdin")
            if line.startswith("/"):
                commands.execute(line, chat)
            elif line.strip():
                answer_plainly(chat, line)
        except EOFError:
            break
        except CloverError as error:
            console.error(str(error))
            all_well = False
        except KeyboardInterrupt:
            if not person:
                raise
            console.note("stopped")
    return all_well


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
    show_plainly(chat, chat.conversation.ask(chat.question(question)))


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
