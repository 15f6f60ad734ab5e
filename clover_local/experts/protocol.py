"""What the model asks of its routed experts, wherever they are; it hands over rows and routing."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from clover_local.errors import SettingsError
from clover_local.experts.traffic import OffloadStats
from clover_local.kernels import dispatch
from clover_local.kernels.dispatch import AnyRouting
from clover_local.residency.demand import Kind

Cut = Callable[[Callable[[], None]], None]
"""Takes work of the host that belongs between what was launched before and what follows."""


@dataclass(frozen=True, eq=False)
class ExpertResults:
    """What routed experts gave, to be added over the places in order."""

    results: Tensor  # [T, P, D] float32
    expert_ids: Tensor | None = None  # [T, P], -1: nothing there, not to be read; None: all count

    def sum(self) -> Tensor:
        """[T, D] float32: the places in order."""
        return dispatch.sum_places(self.results, self.expert_ids)


class Experts(Protocol):
    """Runs the routed experts of a layer, wherever their weights are."""

    @property
    def waits_because(self) -> str | None:
        """Why a forward waits for the device, so that no CUDA graph can hold it; None: it doesn't.

        Asked once: it may not change.
        """

    def stats(self) -> OffloadStats | None:
        """What the cache of experts did since the start; None where every expert is resident."""

    def shrink(self) -> str | None:
        """Gives up some of the device's memory, and says so in a line; None: it needs all of it."""

    def resize(self, slots: int) -> None:
        """Another number of experts on the device, between two forwards.

        Raises:
            SettingsError: so many cannot be there, or the number cannot change.
        """

    def begin(self, kind: Kind, *, block: int) -> None:
        """A forward is about to ask for one layer after the other.

        Args:
            kind: what it is; a prompt should not take the place of what an answer uses.
            block: the tokens committed before it: the same for the passes of a block and its
                commit, another one for every block.
        """

    def cut_with(self, cut: Cut | None) -> None:
        """From now on what the host does in a forward goes to `cut`, to be done between graphs.

        Until the next call, `forward` then hands over its work in place of doing it, and its
        results are at the same place for the same number of rows. None: it does it at once.
        """

    def forward(self, layer: int, x: Tensor, *, routing: AnyRouting) -> ExpertResults:
        """The weighted results of each row's experts; `x` [T, D]."""
        ...


class Uncached:
    """What `Experts` without a cache have in common: nothing to tell, nothing to give up."""

    def stats(self) -> OffloadStats | None:
        """See `Experts.stats`."""
        return None

    def shrink(self) -> str | None:
        """See `Experts.shrink`."""
        return None

    def resize(self, slots: int) -> None:
        """See `Experts.resize`."""
        raise SettingsError(
            f"{slots} expert slots: every expert is in its place here: start with --expert-slots"
        )

    def begin(self, kind: Kind, *, block: int) -> None:
        """See `Experts.begin`."""

    def cut_with(self, cut: Cut | None) -> None:
        """See `Experts.cut_with`; the host does nothing in a forward."""
