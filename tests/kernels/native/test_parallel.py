"""A function runs in as many threads as torch has, and no more than there are tasks."""

import ctypes
import threading

import pytest
import torch

from clover_local.kernels.native import parallel
from clover_local.kernels.native.parallel import run


def callers(*, tasks: int) -> list[int]:
    """The value in the call that each thread of a run saw."""
    seen: list[int] = []
    lock = threading.Lock()

    def look(address: int) -> None:
        with lock:
            seen.append(ctypes.c_int64.from_address(address).value)

    function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(look)
    call = (ctypes.c_int64 * 1)(17)
    run(ctypes.cast(function, ctypes.c_void_p).value or 0, call, tasks=tasks)
    return seen


@pytest.fixture
def openmp() -> None:
    if parallel._openmp() is None:
        pytest.skip("torch has no libgomp here")


@pytest.mark.usefixtures("openmp")
@pytest.mark.parametrize(("threads", "tasks", "used"), [(3, 9, 3), (3, 2, 2), (1, 9, 1), (3, 1, 1)])
def test_every_thread_gets_the_call(
    threads: int, tasks: int, used: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    assert callers(tasks=tasks) == [17] * used


def test_without_openmp_the_calling_thread_does_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    monkeypatch.setattr(parallel, "_openmp", lambda: None)
    assert callers(tasks=9) == [17]
