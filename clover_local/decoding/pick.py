"""How logits become tokens: bans, controls, argmax or draw, row statistics.

`pick` is the definition. An unmasking rule sees `RowStatistics`, never logits, so the same few
numbers can be made on the host (`host_pick.py`) or where the logits are (`device_pick.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from clover_local.decoding.controls import Controls, ResponseControls
from clover_local.decoding.draw import draw, largest
from clover_local.decoding.random import PICK, uniform
from clover_local.decoding.settings import Settings
from clover_local.errors import CloverError

if TYPE_CHECKING:  # it judges what this file picks
    from clover_local.decoding.speculation.acceptance import Judged

TOP = 5


@dataclass(frozen=True)
class RowStatistics:
    """What one pass says about each row; all probabilities are at temperature 1, float32."""

    token: Tensor  # [rows] int64
    confidence: Tensor  # [rows] probability of `token` over the controlled logits
    raw_confidence: Tensor  # [rows] the same before the response controls (bans apply to both)
    entropy: Tensor  # [rows] nats, of the controlled distribution
    top_ids: Tensor  # [rows, 5] int64, by falling probability, a lower id first among equals
    top_probabilities: Tensor  # [rows, 5]
    still_passes: Tensor | None = None  # [rows] int64, for the rule `klass`

    def cpu(self) -> "RowStatistics":
        """The same numbers in host memory."""
        moved: dict[str, Any] = {}
        for field in fields(self):
            value: Tensor | None = getattr(self, field.name)
            moved[field.name] = None if value is None else value.cpu()
        return RowStatistics(**moved)


@dataclass(frozen=True)
class Accept:
    """Which masked rows leave the mask in this pass, and why."""

    accept: Tensor  # [rows] bool
    reasons: tuple[str, ...]  # one a row, "" for a row that stays masked


@dataclass(eq=False)
class DeviceBlock:
    """The active block where the model reads it, so that a pass need not send it there again."""

    ids: Tensor  # [B] int64 on the device
    host: list[int]
    """What `ids` is known to hold; empty while that is not known."""


class Picker(Protocol):
    """What a run picks tokens with. All results are in host memory.

    Row r of the logits stands at response position `controls.length + r + 1`.
    """

    def pick(
        self,
        logits: Tensor,
        controls: ResponseControls,
        *,
        rows: Sequence[int],
        visible: Sequence[int] = (),
        pass_number: int = 0,
    ) -> RowStatistics:
        """Tokens and statistics for `rows` of `logits` [B, V].

        Raises:
            CloverError: as `pick`.
        """

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
        """The same for the masked rows of a block, and which of them the rule accepts.

        Args:
            logits: [B, V].
            controls: of the response so far.
            block: its B tokens.
            rows: the masked ones, at least one.
            on_device: the same block on the device. A picker that accepts there writes the
                accepted tokens into it.
            pass_number: pass in the block, from 0.

        Raises:
            CloverError: as `pick`.
        """

    def propose(
        self, logits: Tensor, controls: ResponseControls, *, block: Sequence[int]
    ) -> RowStatistics:
        """The likeliest token of each row of a previewed block but the first.

        The first one is the last token that `controls` count: row r stands at response position
        `controls.length + r`. Logits [B, V].

        Raises:
            CloverError: as `pick`.
        """

    def judge(
        self, logits: Tensor, controls: ResponseControls, *, drafts: Sequence[int]
    ) -> "Judged":
        """Which drafts are accepted, by the logits [w, V] of a verify of the last token and them.

        Raises:
            CloverError: as `pick`.
            ValueError: not one draft less than rows.
        """


@dataclass(frozen=True, eq=False)
class ControlledRows:
    """Rows of logits after bans and controls, and their distributions at temperature 1."""

    logits: Tensor  # [rows, V] float32
    probabilities: Tensor  # [rows, V]
    raw: Tensor | None  # [rows, V] probabilities before the response controls, where those differ

    @classmethod
    def of(cls, logits: Tensor, controls: Controls, positions: Sequence[int]) -> "ControlledRows":
        """Of `logits` [rows, V] float32, which are changed in place.

        Raises:
            CloverError: logits that are NaN or infinite, or a row in which every token is banned.
        """
        logits = controls.ban(logits)
        raw = logits.softmax(-1) if controls.act_on_response else None
        logits = controls.apply(logits)
        probabilities = logits.softmax(-1)
        _refuse_nan(probabilities, positions)
        return cls(logits, probabilities, raw)

    def plus(self, bonus: Tensor) -> "ControlledRows":
        """The rows with `bonus` [rows, V] added to their logits, before controls and after."""
        logits = self.logits + bonus
        raw = None if self.raw is None else (self.raw.log() + bonus).softmax(-1)
        return ControlledRows(logits, logits.softmax(-1), raw)

    @property
    def entropy(self) -> Tensor:
        """[rows], nats."""
        terms: Tensor = torch.special.entr(self.probabilities)
        return terms.sum(-1)

    def of_tokens(self, token: Tensor) -> Tensor:
        """Each row's probability of its own `token` [rows]."""
        return self.probabilities.gather(1, token[:, None])[:, 0]

    def first(self, rows: int) -> "ControlledRows":
        """The first `rows` rows."""
        raw = None if self.raw is None else self.raw[:rows]
        return ControlledRows(self.logits[:rows], self.probabilities[:rows], raw)

    def statistics(self, token: Tensor) -> RowStatistics:
        """What these rows say about the `token` [rows] of each."""
        confidence = self.of_tokens(token)
        top = largest(self.logits, min(TOP, self.logits.shape[1]))
        return RowStatistics(
            token=token,
            confidence=confidence,
            raw_confidence=(
                confidence if self.raw is None else self.raw.gather(1, token[:, None])[:, 0]
            ),
            entropy=self.entropy,
            top_ids=top,
            top_probabilities=self.probabilities.gather(1, top),
        )


@torch.inference_mode()
def pick(
    logits: Tensor,
    controls: Controls,
    settings: Settings,
    *,
    rows: Sequence[int],
    positions: Sequence[int],
    pass_number: int,
) -> RowStatistics:
    """A token for every row of `rows`, greedy at temperature 0 (lower id wins a tie), else drawn.

    Args:
        logits: [B, V]; left as they are.
        controls: built for `rows`, on the same device.
        settings: temperature, top_k, top_p and seed are read.
        rows: which rows of `logits`, at least one.
        positions: the 1-based response position of each of `rows`.
        pass_number: pass in the block, from 0.

    Raises:
        CloverError: logits that are NaN or infinite, or a row in which every token is banned.
    """
    chosen = torch.tensor(rows, device=logits.device)
    controlled = ControlledRows.of(logits[chosen].float(), controls, positions)  # a copy
    return pick_controlled(controlled, settings, positions=positions, pass_number=pass_number)


def pick_controlled(
    controlled: ControlledRows,
    settings: Settings,
    *,
    positions: Sequence[int],
    pass_number: int,
) -> RowStatistics:
    """As `pick`, of logits that the controls have changed already."""
    if settings.temperature > 0:
        uniforms = torch.tensor(
            [uniform(settings.seed, n, pass_number=pass_number, purpose=PICK) for n in positions],
            dtype=torch.float64,
        )
        token = draw(
            controlled.logits,
            uniforms,
            temperature=settings.temperature,
            top_k=settings.top_k,
            top_p=settings.top_p,
        )
    else:
        token = controlled.logits.argmax(-1)
    return controlled.statistics(token)


def no_numbers(position: int) -> CloverError:
    """The refusal of a row's logits; `position` is its own in the response."""
    return CloverError(
        f"the model's logits at response position {position} are no numbers (NaN, infinite, or "
        "every token suppressed): run `clover-local verify` on the model's folder or download its "
        "file again, check --suppress"
    )


def _refuse_nan(probabilities: Tensor, positions: Sequence[int]) -> None:
    """A softmax over NaN, +inf, or nothing but -inf is NaN in the whole row."""
    broken = probabilities[:, 0].isnan()
    if bool(broken.any()):
        raise no_numbers(positions[int(broken.int().argmax())])
