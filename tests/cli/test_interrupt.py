"""Ctrl-C while something is followed."""

import os
import signal
from collections.abc import Generator

import pytest

from clover_local.cli.interrupt import follow, orderly_end, single_interrupt

pytestmark = pytest.mark.skipif(os.name != "posix", reason="sends itself SIGINT")


def press_ctrl_c() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def counting(closed: list[str], *, interrupt_at: int | None = None) -> Generator[int, None, None]:
    try:
        for number in range(5):
            if number == interrupt_at:
                press_ctrl_c()
            yield number
    finally:
        press_ctrl_c()  # a second, impatient one: must not stop the clean-up
        closed.append("closed")


def test_everything_is_seen_without_ctrl_c() -> None:
    seen: list[int] = []
    closed: list[str] = []

    def quiet() -> Generator[int, None, None]:
        yield from range(3)
        closed.append("end")

    assert follow(quiet(), seen.append)
    assert (seen, closed) == ([0, 1, 2], ["end"])


def test_ctrl_c_in_the_listener_ends_and_closes() -> None:
    seen: list[int] = []
    closed: list[str] = []

    def listen(number: int) -> None:
        seen.append(number)
        if number == 2:
            press_ctrl_c()

    assert not follow(counting(closed), listen)
    assert (seen, closed) == ([0, 1, 2], ["closed"])


def test_ctrl_c_inside_the_work_ends_and_closes() -> None:
    seen: list[int] = []
    closed: list[str] = []
    assert not follow(counting(closed, interrupt_at=3), seen.append)
    assert (seen, closed) == ([0, 1, 2], ["closed"])


def test_afterwards_ctrl_c_is_what_it_was() -> None:
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), single_interrupt():
        press_ctrl_c()
    assert signal.getsignal(signal.SIGINT) is before


def test_a_background_job_goes_on_ignoring_ctrl_c() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with single_interrupt():
            press_ctrl_c()
    finally:
        signal.signal(signal.SIGINT, before)


def test_other_errors_pass_and_close() -> None:
    closed: list[str] = []

    def work() -> Generator[int, None, None]:
        try:
            yield 1
            raise RuntimeError("broken")
        finally:
            closed.append("closed")

    with pytest.raises(RuntimeError, match="broken"):
        follow(work(), lambda number: None)
    assert closed == ["closed"]


def test_sigterm_lets_clean_up_run_and_is_code_143() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as caught, orderly_end():
        os.kill(os.getpid(), signal.SIGTERM)
    assert caught.value.code == 143
    assert signal.getsignal(signal.SIGTERM) is before
