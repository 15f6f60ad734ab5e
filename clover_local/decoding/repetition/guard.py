"""The loop guard: what is done about an answer that repeats itself without end.

A block that loops is found before it is committed, so trying it anew costs no rewind of the state,
and nobody has read it. Where tokens are shown one by one (`ar`, `draft`) there is nothing to take
back: the guard looks at every 32 tokens, raises the penalties, and at last ends the answer.
"""

from collections.abc import Sequence
from dataclasses import replace
from enum import Enum

from clover_local.decoding.repetition.loops import WINDOW, good_length, loops
from clover_local.decoding.settings import Settings

STRENGTH = 0.5
"""Added to `frequency_penalty` for each level."""
LEVELS = 3
RETRIES = 2
RETRY_NGRAM = 4
STRIDE = 32
_SEED_STEP = 0x9E3779B97F4A7C15  # odd, so that no two retries share a seed
_SEEDS = 1 << 64


class Verdict(Enum):
    """What becomes of tokens that were just made."""

    KEEP = "keep"
    RETRY = "retry"
    STOP = "stop"


class LoopGuard:
    """Watches one answer; `settings` are those that its next forwards should have."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._given = settings
        self._level = 0
        self._retries = 0
        self._seen = 0

    def judge(self, response: Sequence[int], block: Sequence[int]) -> Verdict:
        """What to do with a `block` of `denoise` behind the `response`; `settings` may change."""
        if self._given.loop_guard == "off":
            return Verdict.KEEP
        if self._given.loop_guard == "retry" and loops(response, block):
            if self._retries == RETRIES:
                return Verdict.STOP
            self._retries += 1
            self.settings = self._for_retry()
            return Verdict.RETRY
        self._seen = len(response) + len(block)  # in `auto` other modes may follow
        return self._judge_kept(response, block)

    def until_look(self, response: Sequence[int]) -> int | None:
        """Tokens until `judge_shown` looks; None: it never does.

        `draft` ends a round there, so that it is judged, and goes on, as `ar` is.
        """
        if self._given.loop_guard == "off":
            return None
        return max(STRIDE - (len(response) - self._seen), 1)

    def judge_shown(self, response: Sequence[int]) -> Verdict:
        """As `judge`, of tokens that were shown already; looks once in `STRIDE` tokens."""
        if self._given.loop_guard == "off" or len(response) - self._seen < STRIDE:
            return Verdict.KEEP
        self._seen = len(response)
        return self._judge_kept(response[-STRIDE - WINDOW : -STRIDE], response[-STRIDE:])

    def _judge_kept(self, response: Sequence[int], block: Sequence[int]) -> Verdict:
        """As `judge`, of a block that is not tried again."""
        if not loops(response, block):
            self._retries, self._level = 0, max(self._level - 1, 0)
        elif self._given.loop_guard == "stop" or self._level == LEVELS:
            return Verdict.STOP
        else:
            self._level += 1
        self.settings = self._raised()
        return Verdict.KEEP

    def worth_keeping(self, response: Sequence[int], block: Sequence[int]) -> int:
        """How many tokens of a block that loops to emit."""
        return good_length(response, block)

    def _raised(self) -> Settings:
        more = STRENGTH * self._level
        if not more:
            return self._given
        penalty = self._given.frequency_penalty + more
        return replace(self._given, frequency_penalty=penalty, guarded=True)

    def _for_retry(self) -> Settings:
        """Another seed, higher penalties, and rows that would repeat go last."""
        given = self._given
        return replace(
            given,
            seed=(given.seed + self._retries * _SEED_STEP) % _SEEDS,
            frequency_penalty=given.frequency_penalty + STRENGTH * self._retries,
            no_repeat_ngram=given.no_repeat_ngram or RETRY_NGRAM,
            guarded=True,
        )
