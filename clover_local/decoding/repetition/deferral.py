"""Rows that a rule accepts and that should wait: repeats within a block, stop tokens too early.

Rows of one pass are picked without sight of each other, so two neighbours may both get the same
word ("the the"). Such a row stays masked instead of getting another token: in the next pass it is
picked in sight of its neighbour. Only where every masked row would have to wait, so that no pass
would change what the model sees, does one row get another of its likely tokens. The end of the
thinking, where a bias makes it certain, comes once in a block.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import torch

from clover_local.decoding.pick import Accept, RowStatistics
from clover_local.decoding.rules.modifiers import doubted
from clover_local.decoding.rules.most_confident import MOST_CONFIDENT, falling
from clover_local.decoding.settings import Settings

OTHER_TOKEN = "other_token"
"""The reason, in the trace, of a row that got another token than it wanted."""


@dataclass
class Surroundings:
    """The response's end and the block behind it, in which rows are filled one by one."""

    tokens: list[int]
    start: int  # of the block in `tokens`
    mask_token_id: int
    ngrams: Collection[tuple[int, ...]]  # of the whole response

    def has(self, token: int) -> bool:
        """Whether `token` stands anywhere in the block."""
        return token in self.tokens[self.start :]

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
) -> tuple[RowStatistics, Accept]:
    """The accepted rows without those that should wait; never none.

    Rows are visited by falling confidence. Where all accepted ones would have to wait, the most
    confident masked row that need not does not wait. Where there is none, the most confident that
    is no early stop token gets the likeliest of its top tokens that repeats nothing; see `_other`.

    Args:
        accepted: by the rule, of the masked rows.
        rows: their statistics.
        settings: which rows should wait.
        places: the rows' places in the block.
        block: its tokens before this pass.
        response: all tokens before the block.
        ngrams: those of `no_repeat_ngram` tokens in it.

    Returns:
        `rows`, with another token in one of them where it was needed, and who is accepted.
    """
    tail = [*response[-max(settings.no_repeat_ngram - 1, 1) :]]
    around = Surroundings([*tail, *block], len(tail), settings.mask_token_id, ngrams)
    order = falling(doubted(rows, settings).confidence).tolist()
    tokens = rows.token.tolist()
    kept = list[int]()
    for i in order:
        if accepted.reasons[i] and not _repeats(around, places[i], tokens[i], settings):
            around.tokens[around.start + places[i]] = tokens[i]
            kept.append(i)
    stops = settings.stop_ids if settings.eos_order else ()
    kept = _without_early_stops(kept, tokens, stop_ids=stops)
    if kept:
        return rows, _accept(accepted, kept, count=len(tokens))
    around = replace(around, tokens=[*tail, *block])
    # Nothing is masked to the left of the first masked row, so it is never an early stop.
    may = [i for i in order if i == 0 or tokens[i] not in stops]
    calm = (i for i in may if not _repeats(around, places[i], tokens[i], settings))
    first = next(calm, None)
    if first is not None:
        return rows, _accept(accepted, [first], count=len(tokens))
    first, barred = may[0], {tokens[may[0]], *(stops if may[0] else ())}
    candidates = [each for each in _candidates(rows, first) if each[0] not in barred]
    other = _other(around, places[first], tokens[first], candidates, settings)
    if other is None:
        return rows, _accept(accepted, [first], count=len(tokens))
    reasons = tuple(OTHER_TOKEN if i == first else "" for i in range(len(tokens)))
    return _with_token(rows, first, *other), Accept(torch.tensor([*map(bool, reasons)]), reasons)


def _accept(accepted: Accept, kept: Collection[int], *, count: int) -> Accept:
    """The `kept` of `count` rows, each for the rule's reason or as the most confident."""
    reasons = [""] * count
    for i in kept:
        reasons[i] = accepted.reasons[i] or MOST_CONFIDENT
    return Accept(torch.tensor([bool(reason) for reason in reasons]), tuple(reasons))


def _candidates(rows: RowStatistics, i: int) -> Iterator[tuple[int, float]]:
    """(token, probability) of what else row `i` may be, the likeliest first."""
    pairs = zip(rows.top_ids[i].tolist(), rows.top_probabilities[i].tolist(), strict=True)
    return (pair for pair in sorted(pairs, key=lambda pair: (-pair[1], pair[0])) if pair[1] > 0)


def _other(
    around: Surroundings,
    row: int,
    token: int,
    candidates: Sequence[tuple[int, float]],
    settings: Settings,
) -> tuple[int, float] | None:
    """Which token a row gets whose own repeats; None where its own is the best there is.

    The first candidate that repeats nothing. Where all complete an n-gram, the row's own; but never
    one that stands beside itself: for that any candidate will do, and where the model leaves no
    other token a probability, the lowest id that is not banned. Under the loop guard an n-gram may
    repeat: a model that is forced to loop is to be found looping.
    """
    doubles = settings.in_block_repetition and around.repeats_neighbour(row, token)
    if settings.guarded and not doubles:
        return None
    calm = (each for each in candidates if not _repeats(around, row, each[0], settings))
    found = next(calm, None)
    if found is not None or not doubles:
        return found
    excluded = {token, *settings.banned_ids, *settings.stop_ids}
    unlikely = ((other, 0.0) for other in range(settings.vocab_size) if other not in excluded)
    single = (
        each for each in chain(candidates, unlikely) if not around.repeats_neighbour(row, each[0])
    )
    return next(single, None)


def _with_token(rows: RowStatistics, i: int, token: int, probability: float) -> RowStatistics:
    """`rows` with another token in row `i`, whose raw confidence nobody has asked for: NaN."""
    chosen = torch.arange(len(rows.token)) == i
    return replace(
        rows,
        token=rows.token.masked_fill(chosen, token),
        confidence=rows.confidence.masked_fill(chosen, probability),
        raw_confidence=rows.raw_confidence.masked_fill(chosen, torch.nan),
    )


def _repeats(around: Surroundings, row: int, token: int, settings: Settings) -> bool:
    if token in settings.stop_ids:  # a block's tail is full of them, and thrown away
        return False
    if settings.ends_thinking_once and token == settings.think_end_token_id and around.has(token):
        return True
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
