"""Rows that a rule accepts and that should wait: repeats within a block, stop tokens too early.

Rows of one pass are picked without sight of each other, so two neighbours may both get the same
word ("the the"). Such a row stays masked instead of getting another token: in the next pass it is
picked in sight of its neighbour.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import torch

from clover_local.decoding.pick import Accept, RowStatistics
from clover_local.decoding.rules.most_confident import MOST_CONFIDENT, falling
from clover_local.decoding.settings import Settings


@dataclass
class Surroundings:
    """The response's end and the block behind it, in which rows are filled one by one."""

    tokens: list[int]
    start: int  # of the block in `tokens`
    mask_token_id: int
    ngrams: Collection[tuple[int, ...]]  # of the whole response

    def repeats_neighbour(self, row: int, token: int) -> bool:
        """Whether `token` in `row` of the block would stand beside itself."""
        place = self.start + row
        left = self.tokens[place - 1] if place else None
        right = self.tokens[place + 1] if place + 1 < len(self.tokens) else None
        return token in (left, right)

    def repeats_ngram(self, row: int, token: int, *, size: int) -> bool:
        """Whether `token` in `row` completes `size` tokens that stand elsewhere too.

        Tokens on both sides count; an n-gram with a mask in it is not complete.
        """
        place, tokens = self.start + row, self.tokens
        tokens[place] = token
        made = [
            (first, tokens[first : first + size])
            for first in range(max(place - size + 1, 0), min(place, len(tokens) - size) + 1)
        ]
        found = any(
            self.mask_token_id not in ngram
            and (tuple(ngram) in self.ngrams or _stands_elsewhere(tokens, ngram, but_at=first))
            for first, ngram in made
        )
        tokens[place] = self.mask_token_id
        return found


def deferred(
    accepted: Accept,
    rows: RowStatistics,
    settings: Settings,
    *,
    places: Sequence[int],
    block: Sequence[int],
    response: Sequence[int],
    ngrams: Collection[tuple[int, ...]] = (),
) -> Accept:
    """The accepted rows without those that should wait; never none.

    Rows are visited by falling confidence. Where all accepted ones would have to wait, the most
    confident masked row that need not does not wait; where there is none, the most confident that
    is no early stop token: so every pass advances, in the worst case by a repeat.

    Args:
        accepted: by the rule, of the masked rows.
        rows: their statistics.
        settings: which rows should wait.
        places: the rows' places in the block.
        block: its tokens before this pass.
        response: all tokens before the block.
        ngrams: those of `no_repeat_ngram` tokens in it.
    """
    tail = [*response[-max(settings.no_repeat_ngram - 1, 1) :]]
    around = Surroundings([*tail, *block], len(tail), settings.mask_token_id, ngrams)
    order, tokens = falling(rows.confidence).tolist(), rows.token.tolist()
    kept = list[int]()
    for i in order:
        if accepted.reasons[i] and not _repeats(around, places[i], tokens[i], settings):
            around.tokens[around.start + places[i]] = tokens[i]
            kept.append(i)
    stops = settings.stop_ids if settings.eos_order else ()
    kept = _without_early_stops(kept, tokens, stop_ids=stops)
    if not kept:
        around = replace(around, tokens=[*tail, *block])
        # Nothing is masked to the left of the first masked row, so it is never an early stop.
        may = [i for i in order if i == 0 or tokens[i] not in stops]
        calm = [i for i in may if not _repeats(around, places[i], tokens[i], settings)]
        kept = [*calm, *may][:1]
    reasons = [""] * len(tokens)
    for i in kept:
        reasons[i] = accepted.reasons[i] or MOST_CONFIDENT
    return Accept(torch.tensor([bool(reason) for reason in reasons]), tuple(reasons))


def _repeats(around: Surroundings, row: int, token: int, settings: Settings) -> bool:
    if token in settings.stop_ids:  # a block's tail is full of them, and thrown away
        return False
    if settings.in_block_repetition and around.repeats_neighbour(row, token):
        return True
    size = settings.no_repeat_ngram
    return size > 0 and around.repeats_ngram(row, token, size=size)


def _without_early_stops(
    kept: Sequence[int], tokens: Sequence[int], *, stop_ids: Collection[int]
) -> list[int]:
    """Of the `kept` masked rows, those before which no row stays masked, or that are no stop."""
    held = {i for i in kept if tokens[i] not in stop_ids}
    first_open = next((i for i in range(len(tokens)) if i not in held), len(tokens))
    return [i for i in kept if i in held or i == first_open]


def _stands_elsewhere(tokens: Sequence[int], ngram: Sequence[int], *, but_at: int) -> bool:
    size, first = len(ngram), ngram[0]
    return any(
        tokens[at] == first and at != but_at and tokens[at : at + size] == ngram
        for at in range(len(tokens) - size + 1)
    )
