"""The writer's thread, and the share of the time that a view takes (by a clock of its own)."""

import threading
from collections.abc import Callable

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


def test_what_is_sent_is_written_in_order_before_close_returns() -> None:
    written: list[str] = []
    writer = Writer(written.append)
    for number in range(100):
        writer.send(f"{number} ")
    writer.close()
    assert "".join(written).split() == [str(number) for number in range(100)]
    assert writer.idle


def test_a_terminal_that_stands_still_holds_nobody_up() -> None:
    goes_on, begun, written = threading.Event(), threading.Event(), list[str]()

    def write(text: str) -> None:
        begun.set()
        assert goes_on.wait(60)
        written.append(text)

    writer = Writer(write)
    writer.send("first ")
    assert begun.wait(60)
    for _ in range(1000):
        writer.send("x")  # returns, though nothing can be written
    assert not writer.idle
    assert written == []
    goes_on.set()
    writer.close()
    assert written == ["first ", "x" * 1000]  # all that had gathered, in one


def test_what_stops_a_write_is_raised_where_it_is_awaited_and_the_rest_is_dropped() -> None:
    calls: list[str] = []

    def closed(text: str) -> None:
        calls.append(text)
        raise SystemExit(141)

    writer = Writer(closed)
    writer.send("lost")
    with pytest.raises(SystemExit):
        writer.close()
    assert calls == ["lost"]


def test_ctrl_c_while_the_terminal_stands_still_drops_what_is_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    goes_on, begun, written = threading.Event(), threading.Event(), list[str]()

    def write(text: str) -> None:
        begun.set()
        assert goes_on.wait(60)
        written.append(text)

    writer = Writer(write)
    writer.send("first")
    assert begun.wait(60)
    writer.send("second")
    thread = writer._thread

    def interrupted(timeout: float) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(thread, "join", interrupted)
        with pytest.raises(KeyboardInterrupt):
            writer.close()
    goes_on.set()
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
