"""Which mode to run next, from what each has done and would have done: numbers in, a name out.

A mode's rate is its tokens over what its forwards cost. How many forwards it needs is known of the
modes that run, and of the others by foresight (`foresight.py`); what a forward costs has to be
measured, so every mode is tried once: `ar` first, as one forward tells all of it. The fastest runs;
another takes over only where it is faster by a margin. Machines and texts change, so the others are
probed now and then, by single forwards: the more a probe loses, and the oftener it told nothing
new, the more rarely.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from clover_local.decoding.auto.foresight import Forwards
from clover_local.decoding.auto.prices import Price

MARGIN = 1.05
"""So much faster another mode must be to take over, when all is known."""
DOUBT, DOUBT_OF_AR = 0.4, 1.5
"""The margin is wider by this, over the stretches known. `ar` is not seen on the same text."""
HALF_LIFE = 32
"""Stretches after which a text counts half."""
FIRST_STRETCHES = 2
"""Of the mode that runs at first, before another one that is no single forward is tried."""
LEAST_INTERVAL, MOST_INTERVAL = 8, 128
"""Stretches between two probes of a mode."""
PROBE_SHARE = 0.005
"""Of the time, at most, for the probes of one mode; `MOST_INTERVAL` goes before it."""
GROWTH = 2.0
"""Passes resolve so many times more rows, the more of the block is resolved: a generous guess."""


@dataclass(frozen=True)
class Choice:
    """The mode of the next stretch, and why."""

    mode: str
    is_probe: bool
    why: str


@dataclass(frozen=True)
class Rate:
    """How fast a mode is here."""

    mode: str
    tokens_per_forward: float
    ms_per_forward: float

    @property
    def tokens_per_second(self) -> float:
        """0 or more."""
        return 1000 * self.tokens_per_forward / max(self.ms_per_forward, 1e-9)


@dataclass(frozen=True)
class AutoUse:
    """What `auto` knows, for people."""

    mode: str  # that it runs by now
    rates: tuple[Rate, ...]  # the fastest first
    probes: int
    changes: int

    @property
    def line(self) -> str:
        """The mode and why."""
        others = [
            f"{rate.mode} {_number(rate.tokens_per_second)}"
            for rate in self.rates
            if rate.mode != self.mode
        ]
        own = next((r.tokens_per_second for r in self.rates if r.mode == self.mode), 0.0)
        against = f" against {', '.join(others)}" if others else ""
        return f"{self.mode}: {_number(own)} tok/s{against}"

    def to_json(self) -> dict[str, object]:
        """The same as an object; `rates` has the fastest first."""
        rates = [
            {
                "mode": rate.mode,
                "tokens_per_second": rate.tokens_per_second,
                "tokens_per_forward": rate.tokens_per_forward,
                "ms_per_forward": rate.ms_per_forward,
            }
            for rate in self.rates
        ]
        return {
            "mode": self.mode,
            "why": self.line,
            "rates": rates,
            "probes": self.probes,
            "changes": self.changes,
        }


def _number(amount: float) -> str:
    """To two digits or all in front of the point."""
    return f"{amount:.0f}" if amount >= 10 else f"{amount:.2g}"


@dataclass(frozen=True)
class Stretch:
    """What a mode has done: a block of tokens, or as much of it as there was, and its cost."""

    forwards: Forwards
    preview_ms: float = 0.0  # of all its previews
    commit_ms: float = 0.0  # of all its commits, or verifies

    @property
    def milliseconds(self) -> float:
        """Of all its forwards."""
        return self.preview_ms + self.commit_ms


def projected(*, rows: int, resolved: int, passes: int) -> Forwards:
    """A block of `denoise`, some rows resolved by `passes` previews, thought to its end.

    With a good will: a probe is left only where even this would be slower.
    """
    left = (rows - resolved) * passes / (GROWTH * resolved)
    return Forwards(rows, passes + left, 1)


class _Known:
    """What is known of one mode."""

    def __init__(self, mode: str) -> None:
        self.mode = mode
        self.preview, self.commit = Price(), Price()
        self.stretches = 0
        """Measured ones."""
        self.asked = 0
        """When it was measured last: a count of all stretches."""
        self.interval = LEAST_INTERVAL
        """Until the next probe; it doubles with each."""
        self.weight = 0.0
        """Stretches whose forwards are known, old ones for less; below their sums."""
        self._tokens = self._previews = self._commits = 0.0

    def fade(self, share: float) -> None:
        """Lets everything known of texts count for a share."""
        self.weight *= share
        self._tokens *= share
        self._previews *= share
        self._commits *= share

    def add(self, forwards: Forwards) -> None:
        """Takes what a text needed, or would have needed."""
        self.weight += 1
        self._tokens += forwards.tokens
        self._previews += forwards.previews
        self._commits += forwards.commits

    def measure(self, stretch: Stretch, *, is_probe: bool) -> None:
        """Takes the prices. A probe follows after a long time, and a surprise on another soon."""
        for price, count, milliseconds in (
            (self.preview, stretch.forwards.previews, stretch.preview_ms),
            (self.commit, stretch.forwards.commits, stretch.commit_ms),
        ):
            if count:
                if is_probe:
                    price.forget()
                price.add(milliseconds / count)
        if is_probe:
            doubled = min(max(2 * self.interval, LEAST_INTERVAL), MOST_INTERVAL)
            self.interval = LEAST_INTERVAL if self.has_news else doubled

    @property
    def has_news(self) -> bool:
        """Whether it costs another price than before."""
        return self.preview.has_news or self.commit.has_news

    @property
    def was_cold(self) -> bool:
        """Whether its first forward paid for what is made once."""
        return self.preview.was_cold or self.commit.was_cold

    @property
    def rate(self) -> Rate | None:
        """None where something is not known yet."""
        forwards = self._previews + self._commits
        if not forwards or not self._tokens:
            return None
        if (self._previews and not self.preview.is_known) or not self._has_commit:
            return None
        return Rate(self.mode, self._tokens / forwards, self._milliseconds / forwards)

    @property
    def _has_commit(self) -> bool:
        """Whether it is known or can be told what a commit costs."""
        return self.commit.is_known or (self.mode == "denoise" and self.preview.is_known)

    @property
    def _commit_ms(self) -> float:
        """That of a block which was never committed is taken to be a preview's."""
        return (self.commit if self.commit.is_known else self.preview).milliseconds

    @property
    def tokens_per_stretch(self) -> float:
        """0 where no text was seen."""
        return self._tokens / self.weight if self.weight else 0.0

    @property
    def _milliseconds(self) -> float:
        previews = self._previews * self.preview.milliseconds
        return previews + self._commits * self._commit_ms

    def milliseconds_for(self, tokens: int) -> float:
        """What some tokens take, where a rate is known; a round of `draft` at least."""
        a_round = self.preview.milliseconds + self._commit_ms if self.mode == "draft" else 0.0
        return max(tokens * self._milliseconds / self._tokens, a_round)

    def loss_of_probe(self, best: float, *, preview_ms: float) -> float:
        """Milliseconds that one probe wastes, where `best` tokens a millisecond could be had."""
        if not self._commits:
            return 0.0
        cost = self._previews * preview_ms + self._commits * self._commit_ms
        loss = (cost - self._tokens / best) / self._commits  # of a block, a round or a token
        if self.mode == "denoise":  # may be left after one preview
            loss = min(loss, preview_ms)
        return max(loss, 0.0)

    def is_hopeless(self, best: float, *, preview_ms: float) -> bool:
        """Whether its previews alone take longer than `best` tokens a millisecond allow.

        Those of `draft` have fewer rows than `denoise` has: half its price is taken for certain.
        """
        return self._tokens < best * self._previews * preview_ms / 2


class Chooser:
    """Chooses among modes for one conversation."""

    def __init__(self, modes: Sequence[str]) -> None:
        """Knows nothing yet.

        Raises:
            ValueError: no modes.
        """
        if not modes:
            raise ValueError("0 modes to choose from, at least 1 is needed")
        self.modes = tuple(modes)
        self._known = {mode: _Known(mode) for mode in self.modes}
        self._current = self.modes[0]
        self._count = 0
        self._text_at = 0  # the stretch whose text was seen last
        self._probes = 0
        self._changes = 0

    def choose(self, *, besides: str | None = None) -> Choice:
        """The mode of the next stretch; `besides`: of what could not be done in that mode."""
        self.settle()
        left = None if besides is None else self._fastest(besides=besides)
        if left is not None:
            return Choice(left.mode, is_probe=False, why=f"{besides} was too slow for this")
        if len(self.modes) == 1:
            return Choice(self._current, is_probe=False, why="the only one")
        if "ar" in self.modes and self._known["ar"].stretches == 0:
            return Choice("ar", is_probe=True, why="not measured yet")
        if self._current != "ar" and self._known[self._current].stretches < FIRST_STRETCHES:
            return Choice(self._current, is_probe=True, why="not measured yet")
        others = [known for known in self._known.values() if known.mode != self._current]
        for known in others:
            if known.stretches == 0 and not self._is_hopeless(known):
                return Choice(known.mode, is_probe=True, why="not measured yet")
            if known.stretches == 1 and any(each.was_cold for each in self._known.values()):
                return Choice(known.mode, is_probe=True, why="measured in a cold start only")
        due = [known for known in others if self._since(known) >= self._interval(known)]
        if due:
            stalest = max(due, key=self._since)
            why = f"not run for {self._since(stalest)} stretches"
            return Choice(stalest.mode, is_probe=True, why=why)
        return Choice(self._current, is_probe=False, why=self.use().line)

    def settle(self) -> None:
        """Changes the mode where another one is faster by the margin."""
        best = self.faster_than(self._current)
        if best is None:
            return
        self._current = best.mode
        self._changes += 1
        for known in self._known.values():
            known.interval = LEAST_INTERVAL

    def milliseconds_besides(self, mode: str, *, tokens: int) -> float:
        """What tokens take in the fastest other mode; without end where none is known."""
        others = (self._known[other] for other in self._rates() if other != mode)
        return min((known.milliseconds_for(tokens) for known in others), default=float("inf"))

    def record(
        self, choice: Choice, stretch: Stretch, foreseen: Mapping[str, Forwards] | None = None
    ) -> None:
        """What a stretch came to; one without forwards says nothing.

        Args:
            foreseen: by mode, what others would have needed for the same text; of the mode itself
                what it would have come to, where it was left early.
        """
        forwards = stretch.forwards
        if not forwards.previews + forwards.commits:
            return
        self._count += 1
        known, before = self._known[choice.mode], self._best()
        self._probes += choice.is_probe
        known.measure(stretch, is_probe=choice.is_probe)
        known.stretches += 1
        known.asked = self._count
        self._see_text(choice.mode, {choice.mode: forwards, **(foreseen or {})})
        beats = 1000 * forwards.tokens > MARGIN * before * stretch.milliseconds > 0
        if choice.is_probe and beats and self._current == "ar" and forwards.commits:
            # `ar` sees nothing of the others: this may be another kind of text.
            known.fade(0.5)
            known.interval = 0

    def price(self, mode: str, *, preview_ms: float | None, commit_ms: float | None) -> None:
        """What forwards of a mode cost that were made for the sake of it; None: not made."""
        known = self._known[mode]
        for price, milliseconds in ((known.preview, preview_ms), (known.commit, commit_ms)):
            if milliseconds is not None:
                price.add(milliseconds)
        if mode == "ar":
            known.add(Forwards(1, 0, 1))

    def unpriced(self) -> tuple[str, ...]:
        """Modes whose forwards were never measured."""
        return tuple(mode for mode, known in self._known.items() if not known.commit.is_known)

    def see(self, needed: Mapping[str, Forwards]) -> None:
        """What modes needed for a text, or would have needed; of one left at once, nothing."""
        for mode, forwards in needed.items():
            if mode in self._known and forwards.tokens:
                self._known[mode].add(forwards)

    def faster_than(self, mode: str) -> Rate | None:
        """The fastest mode, if it is faster than `mode` by the margin."""
        own, best = self._rates().get(mode), self._fastest()
        if own is None or best is None or best.mode == mode:
            return None
        least = self._margin(best.mode, mode) * own.tokens_per_second
        return best if best.tokens_per_second > least else None

    def use(self) -> AutoUse:
        """What is known by now."""
        rates = sorted(self._rates().values(), key=lambda rate: -rate.tokens_per_second)
        return AutoUse(self._current, tuple(rates), self._probes, self._changes)

    def _see_text(self, mode: str, needed: Mapping[str, Forwards]) -> None:
        """Takes how many forwards a text needed in `mode`, or would have needed in others."""
        if mode != "ar":
            share = 0.5 ** ((self._count - self._text_at) / HALF_LIFE)
            self._text_at = self._count
            for known in self._known.values():
                known.fade(share)
        self.see(needed)

    def _rates(self) -> dict[str, Rate]:
        rates = ((mode, known.rate) for mode, known in self._known.items())
        return {mode: rate for mode, rate in rates if rate is not None}

    def _fastest(self, *, besides: str | None = None) -> Rate | None:
        """Of the modes that are known, but one; None where none is."""
        rates = (rate for mode, rate in self._rates().items() if mode != besides)
        return max(rates, key=lambda rate: rate.tokens_per_second, default=None)

    def _best(self) -> float:
        """Tokens a second, 0 where nothing is known."""
        fastest = self._fastest()
        return 0.0 if fastest is None else fastest.tokens_per_second

    def _since(self, known: _Known) -> int:
        """Stretches since the last of this mode."""
        return self._count - known.asked

    def _interval(self, known: _Known) -> float:
        """Stretches between two probes of a mode."""
        best = self._best() / 1000
        if best == 0:
            return known.interval
        stretch = max(self._known[self._current].tokens_per_stretch, 1.0) / best
        loss = known.loss_of_probe(best, preview_ms=self._preview_ms(known))
        return min(max(known.interval, loss / stretch / PROBE_SHARE), MOST_INTERVAL)

    def _is_hopeless(self, known: _Known) -> bool:
        """Whether a mode that was never measured cannot be the fastest, by what others tell."""
        return known.is_hopeless(self._best() / 1000, preview_ms=self._preview_ms(known))

    def _preview_ms(self, known: _Known) -> float:
        """Milliseconds of a preview; of another mode, where this one has not run."""
        prices = [known.preview, *(other.preview for other in self._known.values())]
        return next((price.milliseconds for price in prices if price.is_known), 0.0)

    def _margin(self, best: str, mode: str) -> float:
        """How many times as fast one has to be for certain."""
        pair = (best, mode)
        seen = min((self._known[each].weight for each in pair if each != "ar"), default=1.0)
        doubt = DOUBT_OF_AR if "ar" in pair else DOUBT
        return MARGIN + doubt / max(seen, 1.0)
