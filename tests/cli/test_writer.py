"""The writer's thread, and the share of the time that a view takes (by a clock of its own)."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType

import pytest

from clover_local.cli.writer import Throttle, Writer


class Clock:
    """Stands still until work takes time."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def taking(self, seconds: float) -> Callable[[], None]:
        """Work of so many seconds."""

        def work() -> None:
            self.now += seconds

        return work


def test_what_is_sent_is_written_in_order_before_it_is_left() -> None:
    written: list[str] = []
    with Writer(written.append) as writer:
        for number in range(100):
            writer.send(f"{number} ")
    assert "".join(written).split() == [str(number) for number in range(100)]
    assert writer.idle


def test_a_terminal_that_stands_still_holds_nobody_up() -> None:
    goes_on, begun, written = threading.Event(), threading.Event(), list[str]()

    def write(text: str) -> None:
        begun.set()
        assert goes_on.wait(60)
        written.append(text)

    with Writer(write) as writer:
        writer.send("first ")
        assert begun.wait(60)
        for _ in range(1000):
            writer.send("x")  # returns, though nothing can be written
        assert not writer.idle
        assert written == []
        goes_on.set()
    assert written == ["first ", "x" * 1000]  # all that had gathered, in one


def test_what_stops_a_write_is_raised_where_it_is_awaited_and_the_rest_is_dropped() -> None:
    calls: list[str] = []

    def closed(text: str) -> None:
        calls.append(text)
        raise SystemExit(141)

    with pytest.raises(SystemExit), Writer(closed) as writer:
        writer.send("lost")
    assert calls == ["lost"]


@pytest.fixture
def ctrl_c_in_close(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Real SIGINTs, one after the other, of which one that strikes in `close` is obeyed."""
    over = threading.Event()

    def interrupt(number: int, frame: FrameType | None) -> None:
        while frame is not None and frame.f_code is not Writer.close.__code__:
            frame = frame.f_back
        if frame is not None:
            over.set()
            raise KeyboardInterrupt

    def press() -> None:
        while not over.wait(0.02):
            os.kill(os.getpid(), signal.SIGINT)

    before = signal.signal(signal.SIGINT, interrupt)
    pressing = threading.Thread(target=press)
    pressing.start()
    yield
    over.set()
    pressing.join()
    signal.signal(signal.SIGINT, before)


@pytest.mark.skipif(os.name != "posix", reason="needs signals")
@pytest.mark.usefixtures("ctrl_c_in_close")
def test_ctrl_c_while_the_terminal_stands_still_drops_what_is_left() -> None:
    goes_on, begun, written = threading.Event(), threading.Event(), list[str]()
    others = set(threading.enumerate())

    def write(text: str) -> None:
        begun.set()
        assert goes_on.wait(60)
        written.append(text)

    with pytest.raises(KeyboardInterrupt), Writer(write) as writer:
        writer.send("first")
        assert begun.wait(60)
        writer.send("second")
    goes_on.set()
    for thread in set(threading.enumerate()) - others:
        thread.join(60)
    assert written == ["first"]


def test_a_frame_that_takes_a_second_is_followed_by_enough_silence() -> None:
    clock = Clock()
    throttle = Throttle(interval=0.05, share=0.02, clock=clock)
    throttle.paint(clock.taking(1))
    frames: list[float] = []
    while not frames:
        clock.now += 0.5
        throttle.paint(lambda: frames.append(clock.now))
    assert frames == [50.0]


@pytest.mark.parametrize("cost", [0.0001, 0.002, 0.03, 1.0])
@pytest.mark.parametrize("text_cost", [0.0, 0.00005, 0.01])
def test_a_view_takes_less_than_three_percent_beside_the_text_itself(
    cost: float, text_cost: float
) -> None:
    clock = Clock()
    throttle = Throttle(clock=clock)
    painted = texts = forwards = 0
    for forward in range(20_000):
        clock.now += 0.005
        forwards += 1
        if forward % 4 == 3:
            throttle.work(clock.taking(text_cost))
            texts += 1
        before = clock.now
        throttle.paint(clock.taking(cost))
        painted += clock.now > before
    beside = forwards * 0.005
    # The text has to be shown: frames get what it leaves of the share, and the first one.
    assert painted * cost <= max(0.02 * clock.now - texts * text_cost, 0) + cost
    assert painted >= 1
    if not text_cost:
        assert (painted - 1) * cost <= 0.03 * beside


def test_frames_keep_an_interval_however_cheap_they_are() -> None:
    clock = Clock()
    throttle = Throttle(interval=0.05, clock=clock)
    frames: list[float] = []
    for _ in range(1000):
        clock.now += 0.001
        throttle.paint(lambda: frames.append(clock.now))
    assert 18 <= len(frames) <= 21
