"""Ctrl-C while an answer is made: it stops the answer, once, and leaves all else standing."""

import signal
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from types import FrameType
from typing import TypeVar

INTERRUPTED = 130
"""Exit code after Ctrl-C: 128 + SIGINT."""

TERMINATED = 143
"""Exit code after SIGTERM: 128 + SIGTERM."""

Event = TypeVar("Event")


def follow(events: Generator[Event, None, None], on_event: Callable[[Event], None]) -> bool:
    """Hands every event to `on_event`, closes `events`; returns False when Ctrl-C ended it early.

    Ctrl-C is KeyboardInterrupt wherever it strikes, between two forwards or inside one; while
    `events` close, further ones are ignored.
    """
    with single_interrupt(), closing(events):
        try:
            for event in events:
                on_event(event)
        except KeyboardInterrupt:
            return False
    return True


@contextmanager
def orderly_end() -> Iterator[None]:
    """Within it, SIGTERM is SystemExit, so that whoever changed the terminal puts it back."""

    def end(signal_number: int, frame: FrameType | None) -> None:
        raise SystemExit(TERMINATED)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def interrupts_dropped() -> Iterator[None]:
    """Within it Ctrl-C does nothing, apart from where `interrupts_heard` says so."""
    with _handled(lambda signal_number, frame: None):  # of its own: SIG_IGN would be inherited
        yield


@contextmanager
def interrupts_heard() -> Iterator[None]:
    """Within it Ctrl-C is KeyboardInterrupt."""
    with _handled(signal.default_int_handler):
        yield


@contextmanager
def _handled(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    before = signal.getsignal(signal.SIGINT)
    if before is signal.SIG_IGN:  # a shell's background job: Ctrl-C is meant for others
        yield
        return
    signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def single_interrupt() -> Iterator[None]:
    """Within it, the first Ctrl-C raises KeyboardInterrupt and later ones do nothing."""

    def interrupt(signal_number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        raise KeyboardInterrupt

    with _handled(interrupt):
        yield
