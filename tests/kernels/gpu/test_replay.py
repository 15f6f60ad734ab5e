"""A function that runs again and again, in one piece or cut into several."""

from typing import Any

import pytest
import torch

from clover_local.kernels.gpu.replay import Replay

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


class Log(list[str]):
    """What happened, in order."""


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Log:
    """Doubles of torch's graphs that write down what is asked of them; capturing runs the code."""
    log = Log()

    class Graph:
        def __init__(self) -> None:
            self.number = sum(entry.startswith("made") for entry in log)
            log.append(f"made {self.number}")

        def replay(self) -> None:
            log.append(f"replay {self.number}")

    class Capture:
        def __init__(self, graph: Graph, *, pool: Any) -> None:
            self.graph = graph

        def __enter__(self) -> None:
            log.append(f"begin {self.graph.number}")

        def __exit__(self, *error: object) -> None:
            log.append(f"end {self.graph.number}")

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", Capture)
    return log


def test_function_is_called_each_time_where_there_are_no_graphs(log: Log) -> None:
    calls = iter(range(9))
    replay = Replay(lambda: next(calls), device=CPU)
    assert [replay(), replay(), replay()] == [0, 1, 2]
    assert not replay.is_captured
    assert log == []


def test_second_run_is_captured_and_replayed(log: Log) -> None:
    calls = iter(range(9))
    replay = Replay(lambda: next(calls), device=CUDA)
    assert replay() == 0
    assert log == []
    assert replay() == 1
    assert log == ["made 0", "begin 0", "end 0", "replay 0"]
    assert replay() == 1
    assert log[4:] == ["replay 0"]
    assert replay.is_captured


def test_work_is_done_between_the_pieces_of_every_run(log: Log) -> None:
    def function() -> str:
        log.append("first")
        replay.cut(lambda: log.append("work"))
        log.append("second")
        return "result"

    replay = Replay(function, device=CUDA)
    assert replay() == "result"
    assert log == ["first", "work", "second"]
    log.clear()
    assert replay() == "result"
    captured = ["made 0", "begin 0", "first", "end 0", "made 1", "begin 1", "second", "end 1"]
    run = ["replay 0", "work", "replay 1"]
    assert log == captured + run
    log.clear()
    assert replay() == "result"
    assert log == run


def test_what_cannot_be_captured_ends_the_capture_and_says_why(log: Log) -> None:
    calls = iter(range(9))

    def function() -> int:
        if next(calls) == 1:
            raise RuntimeError("it waits")
        return 7

    replay = Replay(function, device=CUDA)
    assert replay() == 7
    with pytest.raises(RuntimeError, match="it waits"):
        replay()
    assert log == ["made 0", "begin 0", "end 0"]
    assert not replay.is_captured
    assert replay() == 7  # captured anew
