"""Bans and response controls: what is done to logits before a token is picked.

Controls count response tokens only, never the prompt. `ResponseControls` keeps the counts of one
run and builds, for the rows of one forward, the `Controls` that act on logits: ids, counts and
per-row biases, in host memory. The same few numbers are what a device kernel takes. Rows of a block
share one history; causal rows of several tokens have one each, the tokens before them (`along`).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from clover_local.decoding.settings import Settings


@dataclass(frozen=True)
class Controls:
    """What acts on the logits of one forward's rows. Empty tensor or None: that control is off."""

    banned: Tensor  # [n] int64
    seen: Tensor  # [m] int64: the distinct tokens of the response
    counts: Tensor  # [m] float32: how often each occurs; [rows, m] where rows differ, 0: not yet
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    stop_ids: Tensor  # [s] int64, distinct
    stop_bias: Tensor | None  # [rows] float32
    think_end_token_id: int | None
    think_end_bias: Tensor | None  # [rows] float32

    def to(self, device: torch.device) -> "Controls":
        """The same controls on `device`."""
        moved: dict[str, Any] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            moved[field.name] = value.to(device) if isinstance(value, Tensor) else value
        return Controls(**moved)

    @property
    def act_on_response(self) -> bool:
        """Whether anything beyond the bans changes a logit."""
        return bool(len(self.seen) or self.stop_bias is not None or self.think_end_bias is not None)

    def ban(self, logits: Tensor) -> Tensor:
        """`logits` [rows, V], changed in place: -inf at every banned id."""
        return logits.index_fill_(1, self.banned, -torch.inf)

    def apply(self, logits: Tensor) -> Tensor:
        """`logits` [rows, V] float32, changed in place: repetition, length, thinking budget."""
        if len(self.seen):
            columns = logits[:, self.seen]
            unseen = columns.clone() if self.counts.dim() == 2 else None
            columns -= self.counts * self.frequency_penalty
            columns -= self.presence_penalty  # once a distinct token, however often it occurs
            if self.repetition_penalty != 1:
                r = self.repetition_penalty
                columns = torch.where(columns < 0, columns * r, columns / r)
            if unseen is not None:
                columns = torch.where(self.counts > 0, columns, unseen)
            logits[:, self.seen] = columns
        if self.stop_bias is not None:
            logits[:, self.stop_ids] += self.stop_bias[:, None]
        if self.think_end_bias is not None:
            logits[:, self.think_end_token_id] += self.think_end_bias
        return logits

    def describe(self) -> dict[str, object]:
        """The response controls in force, for the trace (its header has the bans)."""
        return {
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "repetition_penalty": self.repetition_penalty,
            "penalised_tokens": len(self.seen),
            "stop_bias": None if self.stop_bias is None else self.stop_bias.tolist(),
            "think_end_bias": None if self.think_end_bias is None else self.think_end_bias.tolist(),
        }


class ResponseControls:
    """The response so far, as counts that grow token by token, and the controls they lead to."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.length = 0
        """Response tokens counted so far."""
        self._index: dict[int, int] = {}  # of a token in `_ids` and `_counts`
        self._ids = np.zeros(64, dtype=np.int64)
        self._counts = np.zeros(64, dtype=np.float32)
        self._banned = torch.tensor(settings.banned_ids, dtype=torch.int64)
        self._stop_ids = torch.tensor(settings.stop_ids, dtype=torch.int64)
        self._repetition = (
            settings.presence_penalty,
            settings.frequency_penalty,
            settings.repetition_penalty,
        ) != (0, 0, 1)

    def __contains__(self, token: int) -> bool:
        return token in self._index

    @property
    def distinct(self) -> int:
        """How many tokens are penalised."""
        return len(self._index) if self._repetition else 0

    def add(self, tokens: Iterable[int]) -> None:
        """Counts emitted tokens; costs nothing for the tokens already counted."""
        for token in tokens:
            place = self._index.setdefault(token, len(self._index))
            if place == len(self._ids):
                self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
                self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
            self._ids[place] = token
            self._counts[place] += 1
            self.length += 1

    def at(self, positions: Sequence[int], *, visible: Sequence[int] = ()) -> Controls:
        """The controls of one forward's rows.

        Args:
            positions: each row's 1-based position in the response.
            visible: the tokens of the active block (masks may be among them).

        Returns:
            Controls whose counts are views: valid until the next `add`.
        """
        s = self.settings
        seen = self.distinct
        thinking = s.think_end_token_id
        may_end = thinking is not None and thinking not in self and thinking not in visible
        return Controls(
            banned=self._banned,
            seen=torch.from_numpy(self._ids[:seen]),
            counts=torch.from_numpy(self._counts[:seen]),
            presence_penalty=s.presence_penalty,
            frequency_penalty=s.frequency_penalty,
            repetition_penalty=s.repetition_penalty,
            stop_ids=self._stop_ids,
            stop_bias=self._ramp(
                s.length_penalty if s.stop_ids else 0.0,
                positions,
                start=s.length_penalty_start,
                window=s.length_penalty_window,
            ),
            think_end_token_id=thinking,
            think_end_bias=self._ramp(
                s.think_end_bias if may_end else 0.0,
                positions,
                start=s.think_end_start,
                window=s.think_end_window,
            ),
        )

    def along(self, tokens: Sequence[int]) -> Controls:
        """The controls of causal rows: row j, from 0, follows the response and `tokens[:j]`.

        There is one row more than `tokens`. A row's history is all that it may count, and all that
        is visible to it: so every row is controlled as in a forward of its own.
        """
        rows = len(tokens) + 1
        controls = self.at(range(self.length + 1, self.length + rows + 1))
        bias, end = controls.think_end_bias, controls.think_end_token_id
        if bias is not None and end is not None and end in tokens:
            bias[[*tokens].index(end) + 1 :] = 0
        if not self._repetition or not tokens:
            return controls
        new = [token for token in dict.fromkeys(tokens) if token not in self]
        place = {token: self.distinct + i for i, token in enumerate(new)}
        counts = torch.zeros(rows, self.distinct + len(new))
        counts[:, : self.distinct] = controls.counts
        for row, token in enumerate(tokens, start=1):
            counts[row:, place.get(token, self._index.get(token, -1))] += 1
        seen = torch.cat([controls.seen, torch.tensor(new, dtype=torch.int64)])
        return replace(controls, seen=seen, counts=counts)

    def _ramp(
        self, strength: float, positions: Sequence[int], *, start: int, window: int
    ) -> Tensor | None:
        """strength * clamp((n - start) / window, 0, 1) for each position n; None if all are 0."""
        if strength == 0 or max(positions) <= start:
            return None
        ramp = [strength * min(max((n - start) / window, 0.0), 1.0) for n in positions]
        return torch.tensor(ramp, dtype=torch.float32)
