"""A function of fixed tensors, run again and again: as CUDA graphs where there is a GPU.

Whatever the function reads or writes besides tensors at fixed addresses is frozen when it is
captured: it may not wait for the device, and what it allocates lies in memory that belongs to the
graphs. What has to be done by the host in the middle of it, it hands over at a cut: then there is a
graph before and a graph behind, and the work is done between them in every run.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Generic, TypeVar

import torch

if TYPE_CHECKING:
    from torch.cuda import _POOL_HANDLE

Result = TypeVar("Result")
Work = Callable[[], None]
"""What the host does between two pieces of a function: reads, copies, launches."""


class Replay(Generic[Result]):
    """`function`, captured at its second run on a CUDA device; called anew each time elsewhere."""

    def __init__(
        self,
        function: Callable[[], Result],
        *,
        device: torch.device,
        pool: "_POOL_HANDLE | None" = None,
    ) -> None:
        """`pool` is memory that graphs share which never need each other's results (see torch)."""
        self._function = function
        self._device = device
        self._pool = pool
        self._warm = False
        self._capture: torch.cuda.graph | None = None
        self._graphs: list[torch.cuda.CUDAGraph] = []
        self._works: list[Work] = []
        self._result: Result | None = None

    @property
    def is_captured(self) -> bool:
        """Whether a run is one launch, and one more for every cut."""
        return self._result is not None

    def cut(self, work: Work) -> None:
        """To be called by the function: `work` is done here, in this run and in every other."""
        if self._capture is None:
            work()
            return
        self._end()
        self._works.append(work)
        self._begin()

    def __call__(self) -> Result:
        """Runs it. Of a captured function the results are the same tensors each time.

        Raises:
            RuntimeError: the function cannot be captured; says why. It can be called by itself.
        """
        if self._device.type != "cuda":
            return self._function()
        if not self._warm:  # compiles what it launches, which cannot be captured
            self._warm = True
            return self._function()
        if self._result is None:
            self._result = self._captured()
        for number, graph in enumerate(self._graphs):
            graph.replay()
            if number < len(self._works):
                self._works[number]()
        return self._result

    def _captured(self) -> Result:
        self._graphs.clear()
        self._works.clear()
        self._begin()
        try:
            return self._function()
        finally:
            self._end()

    def _begin(self) -> None:
        self._graphs.append(torch.cuda.CUDAGraph())
        self._capture = torch.cuda.graph(self._graphs[-1], pool=self._pool)
        self._capture.__enter__()

    def _end(self) -> None:
        assert self._capture is not None
        capture, self._capture = self._capture, None
        capture.__exit__(None, None, None)
