"""What another mode would have needed for the same text, told from the forwards that were made.

A mode that does not run costs nothing this way, and the comparison is one over the same text: far
fewer stretches decide it than two modes need that are tried on different ones.

From `denoise` to `draft`: each pass shows the likeliest token of every row that is still masked,
which is what a draft would have proposed; the block that came of it stands for the verify. From
`draft` to `denoise`: a block takes a pass, and more for the rows that the previews of its rounds
were not sure of. How many more is learnt from blocks that were denoised.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from clover_local.decoding.events import PassDone
from clover_local.decoding.result import Fixed


@dataclass(frozen=True)
class Forwards:
    """Tokens, and the forwards that a mode needs for them: fractions where they are estimated."""

    tokens: float
    previews: float
    commits: float  # of `draft`: verifies


@dataclass(frozen=True)
class Rounds:
    """Rounds of `draft`, made or thought."""

    count: int
    unsure_rows: int  # tokens that came of them and that their previews were not sure of


def rounds_for_block(
    passes: Sequence[PassDone], emitted: Sequence[int], *, width: int, threshold: float
) -> Rounds:
    """Rounds of `draft`, `width` rows each, for the emitted tokens of a block that was denoised.

    A round proposes what the first pass did that had all rows before resolved, and keeps it as far
    as it is what was emitted, and one token more.

    Args:
        passes: of the block, in order.
        emitted: the block's first rows.
        width: 1 or more.
        threshold: a row with more confidence is sure.
    """
    proposals = [_Shown.of(event) for event in passes]
    length = count = unsure_rows = 0
    while length < len(emitted):
        done = [*emitted[:length]]
        known = next((p for p in proposals if p.before[:length] == done), proposals[-1])
        behind = range(length, min(length + width - 1, len(emitted)))
        accepted = next(
            (n for n, row in enumerate(behind) if known.likely[row] != emitted[row]), len(behind)
        )
        end = min(length + accepted + 1, len(emitted))
        unsure_rows += sum(sure <= threshold for sure in known.confidence[length:end])
        count, length = count + 1, end
    return Rounds(count, unsure_rows)


@dataclass(frozen=True)
class _Shown:
    """What a pass makes of a block."""

    before: list[int]  # as it found it; a row that was masked has -1
    likely: list[int]  # with the likeliest token of each masked row
    confidence: list[float]  # 1 for a row that had been resolved

    @classmethod
    def of(cls, event: PassDone) -> "_Shown":
        """Of a pass that is done."""
        before, likely = list(event.tokens), list(event.tokens)
        confidence = [1.0] * len(before)
        for picked in event.picked:
            before[picked.row], likely[picked.row] = -1, picked.token
            confidence[picked.row] = picked.confidence
        return cls(before, likely, confidence)


class PassesForRounds:
    """Passes of `denoise` for the tokens of rounds: a line through blocks that were denoised.

    passes - 1 = base + slope * unsure rows, by least squares over old blocks with falling weight.
    """

    _KEPT = 0.9  # of what was learnt, with every block
    # Three blocks to begin with, as the demo has them (docs/log.md): two of 0 unsure rows took 0.25
    # further passes each, one of 2 took 1.4.
    _BEFORE = (3.0, 2.0, 4.0, 1.9, 2.8)

    def __init__(self) -> None:
        """Knows a line to begin with."""
        self._learnt: tuple[float, ...] = (0.0,) * len(self._BEFORE)

    def learn(self, *, passes: int, unsure_rows: int) -> None:
        """From a denoised block."""
        u, p = float(unsure_rows), float(passes - 1)
        block = (1.0, u, u * u, p, u * p)
        self._learnt = _sum(tuple(self._KEPT * old for old in self._learnt), block)

    def forwards(self, *, tokens: int, unsure_rows: int, block_size: int, is_end: bool) -> Forwards:
        """For tokens of some rounds; `is_end`: the last block is not filled."""
        n, u, uu, p, up = _sum(self._BEFORE, self._learnt)
        slope = max((n * up - u * p) / (n * uu - u * u), 0.0)
        base = max((p - slope * u) / n, 0.0)
        blocks = ceil(tokens / block_size) if is_end else tokens / block_size
        return Forwards(tokens, (1 + base) * blocks + slope * unsure_rows, blocks)


def _sum(first: Sequence[float], second: Sequence[float]) -> tuple[float, ...]:
    return tuple(a + b for a, b in zip(first, second, strict=True))


def unsure(picked: Sequence[Fixed], *, rows: int, threshold: float) -> int:
    """How many of a block's first `rows` a preview was not sure of."""
    return sum(row.row < rows and row.confidence <= threshold for row in picked)
