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

from clover_local.decoding.repetition.dry import dry_penalties
from clover_local.decoding.repetition.history import History, Known
from clover_local.decoding.settings import Settings
from clover_local.files import STRONGEST


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
    stop_banned: Tensor | None = None  # [rows] bool: too early for a stop token
    dry_rows: Tensor | None = None  # [n] int64: of what DRY costs, and ...
    dry_ids: Tensor | None = None  # [n] int64: ... of which token
    dry_costs: Tensor | None = None  # [n] float32

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
        given = (self.stop_bias, self.think_end_bias, self.stop_banned, self.dry_costs)
        return bool(len(self.seen)) or any(each is not None for each in given)

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
        if self.dry_costs is not None:
            logits[self.dry_rows, self.dry_ids] -= self.dry_costs
        if self.stop_banned is not None:
            logits[:, self.stop_ids] = logits[:, self.stop_ids].masked_fill(
                self.stop_banned[:, None], -torch.inf
            )
        return logits

    def describe(self) -> dict[str, object]:
        """The response controls in force, for the trace (its header has the bans)."""
        own: dict[str, object] = {}
        if self.stop_banned is not None:
            own["stop_banned"] = self.stop_banned.tolist()
        if self.dry_rows is not None and self.dry_ids is not None and self.dry_costs is not None:
            tensors = (self.dry_rows, self.dry_ids, self.dry_costs)
            own["dry"] = [list(cost) for cost in zip(*map(Tensor.tolist, tensors), strict=True)]
        return {
            **own,
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
        self.response: list[int] = []
        """The tokens counted so far, in order."""
        self.ngrams: set[tuple[int, ...]] = set()
        """All of `no_repeat_ngram` tokens in the response; none while that is off."""
        self._index: dict[int, int] = {}  # of a token in `_ids` and `_counts`
        self._ids = np.zeros(64, dtype=np.int64)
        self._counts = np.zeros(64, dtype=np.float32)
        self._history = History()  # follows the response where DRY asks for it
        self._ngram_size = 0
        self.use(settings)

    def use(self, settings: Settings) -> None:
        """Other settings from here on; what is counted stays counted."""
        self.settings = settings
        self._banned = torch.tensor(settings.banned_ids, dtype=torch.int64)
        self._stop_ids = torch.tensor(settings.stop_ids, dtype=torch.int64)
        self._repetition = (
            settings.presence_penalty,
            settings.frequency_penalty,
            settings.repetition_penalty,
        ) != (0, 0, 1)
        size = settings.no_repeat_ngram
        if size != self._ngram_size:
            self._ngram_size = size
            starts = range(self.length - size + 1) if size else ()
            self.ngrams = {tuple(self.response[at : at + size]) for at in starts}

    @property
    def length(self) -> int:
        """Response tokens counted so far."""
        return len(self.response)

    def __contains__(self, token: int) -> bool:
        return token in self._index

    @property
    def penalises(self) -> bool:
        """Whether tokens that the response has cost something."""
        return self._repetition

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
            self.response.append(token)
            size = self._ngram_size
            if 0 < size <= self.length:
                self.ngrams.add(tuple(self.response[-size:]))

    def at(
        self,
        positions: Sequence[int],
        *,
        visible: Sequence[int] = (),
        visible_from: int | None = None,
    ) -> Controls:
        """The controls of one forward's rows.

        Args:
            positions: each row's 1-based position in the response.
            visible: the tokens of the active block (masks may be among them).
            visible_from: response tokens before the block; all, if not given.

        Returns:
            Controls whose counts are views: valid until the next `add`.
        """
        controls = self._without_dry(positions, visible=visible)
        if self.settings.dry_multiplier == 0:
            return controls
        known = self._known(visible, start=self.length if visible_from is None else visible_from)
        return self._with_dry(controls, [(known, n - 1) for n in positions])

    def _without_dry(self, positions: Sequence[int], *, visible: Sequence[int] = ()) -> Controls:
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
            stop_banned=self._too_early(positions),
        )

    def along(self, tokens: Sequence[int]) -> Controls:
        """The controls of causal rows: row j, from 0, follows the response and `tokens[:j]`.

        There is one row more than `tokens`. A row's history is all that it may count, and all that
        is visible to it: so every row is controlled as in a forward of its own.
        """
        rows = len(tokens) + 1
        places = range(self.length, self.length + rows)
        controls = self._without_dry([place + 1 for place in places])
        if self.settings.dry_multiplier > 0:
            known = self._known(tokens, start=self.length)
            controls = self._with_dry(controls, [(known.first(place), place) for place in places])
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

    def _too_early(self, positions: Sequence[int]) -> Tensor | None:
        """For each position, whether a stop token is banned there; None if nowhere."""
        least = self.settings.min_new_tokens
        if not self.settings.stop_ids or min(positions) >= least:
            return None
        return torch.tensor([n < least for n in positions])

    def _known(self, tokens: Sequence[int], *, start: int) -> Known:
        """The response up to `start`, then `tokens`, as DRY searches them."""
        self._history.follow(self.response)
        return self._history.known(tokens, start=start)

    def _with_dry(self, controls: Controls, rows: Sequence[tuple[Known, int]]) -> Controls:
        """`controls` with what DRY costs in each row, of (all known tokens, the row's place)."""
        s = self.settings
        costs = [
            (row, token, cost)
            for row, (known, place) in enumerate(rows)
            for token, cost in dry_penalties(
                known,
                place,
                multiplier=s.dry_multiplier,
                base=s.dry_base,
                allowed=s.dry_allowed,
                breakers=(*s.dry_breakers, *s.stop_ids),
                mask_token_id=s.mask_token_id,
            ).items()
        ]
        if not costs:
            return replace(controls, dry_rows=None, dry_ids=None, dry_costs=None)
        of_rows, ids, amounts = zip(*costs, strict=True)
        return replace(
            controls,
            dry_rows=torch.tensor(of_rows),
            dry_ids=torch.tensor(ids),
            dry_costs=torch.tensor(amounts, dtype=torch.float32).clamp(max=STRONGEST),
        )

    def _ramp(
        self, strength: float, positions: Sequence[int], *, start: int, window: int
    ) -> Tensor | None:
        """strength * clamp((n - start) / window, 0, 1) for each position n; None if all are 0."""
        if strength == 0 or max(positions) <= start:
            return None
        ramp = [strength * min(max((n - start) / window, 0.0), 1.0) for n in positions]
        return torch.tensor(ramp, dtype=torch.float32)
