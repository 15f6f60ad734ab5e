"""A function of fixed tensors, run again and again: as a CUDA graph where there is a GPU.

Whatever the function reads or writes besides tensors at fixed addresses is frozen at its first run:
it may not wait for the device, and what it allocates lies in memory that belongs to the graph.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Generic, TypeVar

import torch

if TYPE_CHECKING:
    from torch.cuda import _POOL_HANDLE

Result = TypeVar("Result")


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
        self._graph: torch.cuda.CUDAGraph | None = None
        self._result: Result | None = None

    @property
    def is_captured(self) -> bool:
        """Whether a run is one launch."""
        return self._graph is not None

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
        if self._graph is None:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool):
                self._result = self._function()
            self._graph = graph
        self._graph.replay()
        assert self._result is not None
        return self._result
