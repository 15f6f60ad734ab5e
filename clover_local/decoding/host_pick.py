"""The pick by plain PyTorch, wherever the logits are; the rule runs on the host.

What the rules `klass` and `credit` remember of a block's earlier passes is kept here, on the device
of the logits: up to 32 rows of the vocabulary (in the memory plan: `pick_workspace`).
"""

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from clover_local.decoding.controls import ResponseControls
from clover_local.decoding.pick import (
    Accept,
    ControlledRows,
    DeviceBlock,
    RowStatistics,
    pick,
    pick_controlled,
)
from clover_local.decoding.repetition.deferral import deferred
from clover_local.decoding.rules.choose import choose
from clover_local.decoding.rules.credit import Credit
from clover_local.decoding.rules.klass import Stillness
from clover_local.decoding.settings import Settings
from clover_local.decoding.speculation.acceptance import Judged, judge


@dataclass
class _Memory:
    """Of one block, from its first pass on."""

    settings: Settings
    credit: Credit | None
    stillness: Stillness | None

    @classmethod
    def empty(cls, settings: Settings) -> "_Memory":
        """Before the first pass: what the rule of `settings` remembers, and nothing in it."""
        credit, stillness = None, None
        if settings.sampler == "credit":
            credit = Credit(
                alpha=settings.sampler_alpha, beta=settings.sampler_beta, gamma=settings.gamma
            )
        if settings.sampler == "klass":
            stillness = Stillness(kl=settings.sampler_kl)
        return cls(settings, credit, stillness)

    def copied(self) -> "_Memory":
        """What a pass may change, so that one which fails half-way leaves this as it was."""
        return _Memory(self.settings, copy(self.credit), copy(self.stillness))


class HostPicker:
    """A `Picker` that takes any device's logits."""

    def __init__(self, statistics: Callable[..., RowStatistics] | None = None) -> None:
        """`statistics` stands in for `pick` in a block whose rule remembers nothing."""
        self._statistics = statistics or self.pick
        self._memory: _Memory | None = None

    def pick(
        self,
        logits: Tensor,
        controls: ResponseControls,
        *,
        rows: Sequence[int],
        visible: Sequence[int] = (),
        pass_number: int = 0,
    ) -> RowStatistics:
        """See `Picker`."""
        positions = [controls.length + row + 1 for row in rows]
        return pick(
            logits,
            controls.at(positions, visible=visible).to(logits.device),
            controls.settings,
            rows=rows,
            positions=positions,
            pass_number=pass_number,
        ).cpu()

    def pick_block(
        self,
        logits: Tensor,
        controls: ResponseControls,
        *,
        block: Sequence[int],
        rows: Sequence[int],
        on_device: DeviceBlock | None,
        pass_number: int,
    ) -> tuple[RowStatistics, Accept]:
        """See `Picker`; a block on the device is left as it is."""
        if controls.settings.remembers_passes:
            statistics = self._pick_with_memory(
                logits, controls, block=block, rows=rows, pass_number=pass_number
            )
        else:
            statistics = self._statistics(
                logits, controls, rows=rows, visible=block, pass_number=pass_number
            )
        return accept_rows(statistics, controls, block=block, rows=rows, pass_number=pass_number)

    def propose(
        self, logits: Tensor, controls: ResponseControls, *, block: Sequence[int]
    ) -> RowStatistics:
        """See `Picker`."""
        rows = range(1, len(block))
        positions = [controls.length + row for row in rows]
        acting = controls.at(positions, visible=block, visible_from=controls.length - 1)
        return pick(
            logits,
            acting.to(logits.device),
            replace(controls.settings, temperature=0.0),
            rows=rows,
            positions=positions,
            pass_number=0,
        ).cpu()

    def judge(self, logits: Tensor, controls: ResponseControls, *, drafts: Sequence[int]) -> Judged:
        """See `Picker`."""
        return judge(
            logits,
            controls.along(drafts).to(logits.device),
            controls.settings,
            drafts=drafts,
            position=controls.length + 1,
        )

    @torch.inference_mode()
    def _pick_with_memory(
        self,
        logits: Tensor,
        controls: ResponseControls,
        *,
        block: Sequence[int],
        rows: Sequence[int],
        pass_number: int,
    ) -> RowStatistics:
        settings, places = controls.settings, list(rows)
        memory = self._memory
        if memory is None or pass_number == 0 or memory.settings != settings:
            memory = _Memory.empty(settings)
        memory = memory.copied()
        positions = [controls.length + row + 1 for row in rows]
        acting = controls.at(positions, visible=block).to(logits.device)
        controlled = ControlledRows.of(
            logits[torch.tensor(places, device=logits.device)].float(), acting, positions
        )
        if memory.credit is not None:
            controlled = controlled.plus(
                memory.credit.bonus(controlled.logits, controlled.probabilities, places)
            )
        statistics = pick_controlled(
            controlled, settings, positions=positions, pass_number=pass_number
        )
        if memory.stillness is not None:
            still = memory.stillness.follow(controlled.probabilities, places)
            statistics = replace(statistics, still_passes=still)
        self._memory = memory
        return statistics.cpu()


def accept_rows(
    statistics: RowStatistics,
    controls: ResponseControls,
    *,
    block: Sequence[int],
    rows: Sequence[int],
    pass_number: int,
) -> tuple[RowStatistics, Accept]:
    """Which masked `rows` of `block` are fixed, and as what.

    By rule and modifiers, less those that wait; where all would, one may get another token.
    """
    settings = controls.settings
    accepted = choose(
        statistics, settings, places=rows, block_size=len(block), pass_number=pass_number
    )
    if not settings.defers_rows:
        return statistics, accepted
    return deferred(
        accepted,
        statistics,
        settings,
        places=rows,
        block=block,
        response=controls.response,
        ngrams=controls.ngrams,
    )
