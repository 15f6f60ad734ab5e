"""Writes to stdout from a thread: a terminal that is slow, or stopped, delays no forward."""

import time
from collections.abc import Callable
from queue import SimpleQueue
from threading import Event, Thread
from typing import Protocol, Self

PAUSE = 0.05
"""Seconds between two writes: what comes meanwhile goes out in one."""


class Output(Protocol):
    """Where a view writes."""

    @property
    def idle(self) -> bool:
        """Whether everything that was sent has been written."""

    def send(self, text: str) -> None:
        """Writes `text` after all that was sent before; returns at once."""


class Writer:
    """Writes what it is sent, in order, while it is entered; leaving it waits for the end of it.

    The queue is the interpreter's own, so that Ctrl-C may strike between any two steps of `send`.
    """

    def __init__(self, write: Callable[[str], None]) -> None:
        """`write` blocks as long as the terminal does.

        It may do so when the program ends, and must hold no lock that the interpreter needs then.
        """
        self._write = write
        self._texts: SimpleQueue[str | None] = SimpleQueue()
        self._sent = 0
        self._done = 0
        self._dropped = False
        self._closing = Event()
        self._ended = Event()
        self._failure: BaseException | None = None
        self._thread = Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def idle(self) -> bool:
        """Whether everything that was sent has been written.

        A `send` that Ctrl-C ended may leave it false for good: no frame is painted any more.
        """
        return self._done == self._sent

    def send(self, text: str) -> None:
        """Writes `text` after all that was sent before; returns at once.

        Raises:
            BaseException: what stopped an earlier write (the terminal has gone), once.
        """
        self._raise_failure()
        if text:
            self._sent += 1
            self._texts.put(text)

    def close(self) -> None:
        """Waits until all is written; where Ctrl-C ends the wait, the rest is dropped.

        Raises:
            BaseException: as `send`.
        """
        self._texts.put(None)
        self._closing.set()
        try:
            # Not `join`: interrupted, it takes the thread for one that has ended (Python 3.11).
            while not self._ended.wait(0.1):
                pass  # a signal is heard between two of these
        except BaseException:
            self._dropped = True
            raise
        self._raise_failure()

    def _raise_failure(self) -> None:
        failure, self._failure = self._failure, None
        if failure is not None:
            self._dropped = True
            raise failure

    def _run(self) -> None:
        texts = [self._texts.get()]
        while texts[-1] is not None:
            while texts[-1] is not None and not self._texts.empty():
                texts.append(self._texts.get())
            shown = [text for text in texts if text is not None]
            if not self._dropped:
                self._try("".join(shown))
            self._done += len(shown)
            if texts[-1] is not None:
                self._closing.wait(PAUSE)
                texts = [self._texts.get()]
        self._ended.set()

    def _try(self, text: str) -> None:
        try:
            self._write(text)
        except BaseException as error:  # of whatever kind: it is raised where it is awaited
            self._failure, self._dropped = error, True


class Throttle:
    """Keeps a view to a small share of the time, and to a frame every `interval` seconds.

    Work that has to be done counts as well: after it frames wait until it is paid for, which a
    second of work is after 1 / `share` seconds. `share` is less than the 3 % that a view may
    cost, because handing over to the writer's thread is not measured.
    """

    def __init__(
        self,
        *,
        interval: float = 0.05,
        share: float = 0.02,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._interval = interval
        self._share = share
        self._clock = clock
        self._paid = self._next = clock()

    def work(self, do: Callable[[], None]) -> None:
        """Calls `do`, and counts the time that it takes."""
        started = self._clock()
        do()
        cost = self._clock() - started
        self._paid = max(self._paid, started) + cost / self._share

    def paint(self, frame: Callable[[], None]) -> None:
        """Calls `frame` if it is time for one."""
        now = self._clock()
        if now >= max(self._paid, self._next):
            self.work(frame)
            self._next = self._clock() + self._interval
