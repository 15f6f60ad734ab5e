"""Which mode to run next, from what each has done so far: numbers in, a name out.

A mode's rate is its tokens a forward over its milliseconds a forward, of its last few stretches.
The fastest runs; another takes over only where it is faster by a margin. Texts change, so the
others are probed now and then: the slower, the more rarely, but one of which little is known gets
the benefit of the doubt.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import sqrt
from statistics import median

WINDOW = 32
"""Steps that a mode is judged by."""
MARGIN = 1.1
"""So much faster another mode must be to take over."""
GROWTH = 2.0
"""Passes resolve so many times more rows, the more of the block is resolved: a generous guess."""
FIRST_STEPS = 4
"""Steps that each mode is tried for in the beginning, unless it is hopeless after one."""
KEPT_STEPS = 8
"""Steps of a mode that still count when it is probed after a while."""
HOPELESS = 0.4
"""Less than this share of the best rate."""
DOUBT = 0.4
"""How far, relatively, the tokens of one step of `denoise` or `draft` are from their mean."""
PROBE_SHARE = 0.02
"""Of the time, for the probes of one mode: those of a slow one are rare."""
LEAST_INTERVAL, MOST_INTERVAL = 8, 128
"""Stretches between two probes of a mode."""


@dataclass(frozen=True)
class Choice:
    """The mode of the next step, and why."""

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
            f"{rate.mode} {rate.tokens_per_second:.0f}"
            for rate in self.rates
            if rate.mode != self.mode
        ]
        own = next((r.tokens_per_second for r in self.rates if r.mode == self.mode), 0.0)
        against = f" against {', '.join(others)}" if others else ""
        return f"{self.mode}: {own:.0f} tok/s{against}"


@dataclass(frozen=True)
class Step:
    """What a mode has done in a stretch: a block of tokens, or as much of it as there was."""

    tokens: float
    forwards: float
    milliseconds: float


def projected(*, rows: int, resolved: int, passes: int, milliseconds: float) -> Step:
    """A block of `denoise`, some rows resolved by `passes` previews, thought to its end.

    With a good will: a probe is left only where even this would be slower.
    """
    left = (rows - resolved) * passes / (GROWTH * resolved)
    forwards = passes + left + 1  # the commit
    return Step(rows, forwards, milliseconds / passes * forwards)


class _Measured:
    """The last steps of one mode."""

    def __init__(self) -> None:
        self._steps = deque[Step](maxlen=WINDOW)
        self._cold = True
        self.asked = 0
        """When it was measured last: a count of all steps."""

    @property
    def steps(self) -> int:
        """How many count."""
        return len(self._steps)

    def add(self, step: Step, *, asked: int) -> None:
        if self._cold and self._steps:  # the first step of all has paid for what is made once
            self._cold = False
            first = self._steps.pop()
            each = min(x.milliseconds / x.forwards for x in (first, step))
            self._steps.append(replace(first, milliseconds=each * first.forwards))
        self._steps.append(step)
        self.asked = asked

    def forget(self) -> None:
        """All but a few steps, before a new one after a long time."""
        while len(self._steps) > KEPT_STEPS:
            self._steps.popleft()

    @property
    def doubt(self) -> float:
        """How far the rate may be from the true one, as a share."""
        return DOUBT / sqrt(len(self._steps))

    def rate(self, mode: str) -> Rate:
        forwards = sum(step.forwards for step in self._steps)
        return Rate(
            mode,
            sum(step.tokens for step in self._steps) / forwards,
            median(step.milliseconds / step.forwards for step in self._steps),
        )


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
        self._measured: dict[str, _Measured] = {}
        self._current = self.modes[0]
        self._asked = 0
        self._probes = 0
        self._changes = 0

    def choose(self) -> Choice:
        """The mode of the next step."""
        for mode in self.modes:
            if mode not in self._measured:
                return Choice(mode, len(self.modes) > 1, "not measured yet")
        others = [mode for mode in self.modes if mode != self._current]
        new = self._least_tried()
        if others and new is not None:
            return Choice(new, True, f"tried {self._measured[new].steps} times so far")
        due = [mode for mode in others if self._since(mode) >= self._interval(mode)]
        if due:
            stalest = max(due, key=self._since)
            return Choice(stalest, True, f"not run for {self._since(stalest)} stretches")
        return Choice(self._current, False, self.use().line)

    def is_worse(self, step: Step) -> bool:
        """Whether a step that came to this would be slower than what is known."""
        best = max((rate.tokens_per_second for rate in self.use().rates), default=0.0)
        return 1000 * step.tokens < best * step.milliseconds

    def record(self, choice: Choice, step: Step) -> None:
        """What a stretch came to; one without forwards says nothing."""
        if step.forwards == 0:
            return
        self._asked += 1
        measured = self._measured.setdefault(choice.mode, _Measured())
        if choice.is_probe:
            measured.forget()
            self._probes += 1
        measured.add(step, asked=self._asked)
        self._take_the_best()

    def use(self) -> AutoUse:
        """What is known by now."""
        rates = [measured.rate(mode) for mode, measured in self._measured.items()]
        rates.sort(key=lambda rate: -rate.tokens_per_second)
        return AutoUse(self._current, tuple(rates), self._probes, self._changes)

    def _least_tried(self) -> str | None:
        """A mode that has not been tried often enough to judge it."""
        rates = {rate.mode: rate.tokens_per_second for rate in self.use().rates}
        least = HOPELESS * max(rates.values())
        few = [
            mode
            for mode, measured in self._measured.items()
            if measured.steps < FIRST_STEPS and rates[mode] >= least and mode != "ar"
        ]
        return min(few, key=lambda mode: self._measured[mode].steps, default=None)

    def _since(self, mode: str) -> int:
        """Stretches since the last of this mode."""
        return self._asked - self._measured[mode].asked

    def _interval(self, mode: str) -> int:
        """Stretches between two probes of a mode, by how much time each of them loses at best."""
        rates = {rate.mode: rate.tokens_per_second for rate in self.use().rates}
        best = max(rates.values())
        # `ar` has one token a forward, without doubt.
        doubt = 0.0 if mode == "ar" else best * self._measured[mode].doubt
        loss = best / max(rates[mode] + doubt, 1e-9) - 1
        return round(min(max(loss / PROBE_SHARE, LEAST_INTERVAL), MOST_INTERVAL))

    def _take_the_best(self) -> None:
        """Changes the mode where another one may be faster by the margin."""
        rates = {rate.mode: rate.tokens_per_second for rate in self.use().rates}
        best = max(rates, key=lambda mode: rates[mode])
        if best == self._current or rates[best] < MARGIN * rates.get(self._current, 0.0):
            return
        self._current = best
        self._changes += 1
