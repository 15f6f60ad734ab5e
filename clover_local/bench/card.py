"""The clock of the GPU bench: everything that needs a card, so that the rest runs without one."""

import time
from collections.abc import Callable
from typing import Protocol

import torch

from clover_local.kernels.gpu import bench
from clover_local.kernels.gpu.bench import Figure

WARM_UP = 6
"""Calls before the timed ones: a commit has two graphs, each captured at its second run."""


class Card(Protocol):
    """What the bench asks of a GPU. All results are seconds if not said otherwise."""

    @property
    def name(self) -> str: ...
    def copy_rate(self) -> float:
        """Bytes a second that it reads and writes when it copies."""

    def empty_graph(self) -> float:
        """A graph that does next to nothing."""

    def experts(self) -> Figure:
        """A layer's experts in a typical pass, by our kernels and by the plain one."""

    def back_to_back(self, call: Callable[[], object]) -> float:
        """One of many calls in a row, none of which waits: what the device takes for one."""

    def graph(self, call: Callable[[], object]) -> float:
        """A call, captured in a graph of its own."""

    def now(self) -> float:
        """The time at which the device has done all that it was told to."""


class CudaCard:
    """The current CUDA device."""

    def __init__(self, *, repeats: int) -> None:
        """`repeats` is how often each thing is timed."""
        self._repeats = repeats

    @property
    def name(self) -> str:
        """As its driver calls it."""
        return torch.cuda.get_device_name()

    def copy_rate(self) -> float:
        """See `Card`."""
        return bench.copy_rate(repeats=self._repeats)

    def empty_graph(self) -> float:
        """See `Card`."""
        return bench.one_kernel_graph_seconds(repeats=self._repeats)

    def experts(self) -> Figure:
        """See `Card`; gives the memory back."""
        (figure,) = bench.expert_figures([bench.PASS], repeats=self._repeats)
        torch.cuda.empty_cache()
        return figure

    def back_to_back(self, call: Callable[[], object]) -> float:
        """See `Card`."""
        for _ in range(WARM_UP):
            call()
        start, end = (
            torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            for _ in range(2)
        )
        torch.cuda.synchronize()
        start.record()
        for _ in range(self._repeats):
            call()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3 / self._repeats

    def graph(self, call: Callable[[], object]) -> float:
        """See `Card`."""
        return bench.graph_seconds([call], repeats=self._repeats)

    def now(self) -> float:
        """See `Card`."""
        torch.cuda.synchronize()
        return time.perf_counter()
