"""`auto`: runs the mode that a `Chooser` names, stretch by stretch, and tells it what that cost.

All modes share the committed state, so any of them may follow any other. What is measured outlives
an answer: the next one begins with the mode that was the fastest.
"""

from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, replace

from clover_local.decoding.auto.chooser import GROWTH, Choice, Chooser, Step, projected
from clover_local.decoding.autoregressive import Autoregressive
from clover_local.decoding.denoise import Denoise, rows_that_count
from clover_local.decoding.events import Event, PassDone
from clover_local.decoding.result import Clock
from clover_local.decoding.run import Mode, Run
from clover_local.decoding.speculation.draft import Draft

MODES: Mapping[str, Mode] = {"denoise": Denoise(), "ar": Autoregressive(), "draft": Draft()}


def measured_milliseconds(clock: Clock) -> float:
    """What the forwards of an answer have taken so far."""
    return 1000 * clock.seconds


@dataclass(frozen=True)
class _Stretch:
    """What is judged at once: up to a block of tokens from a point where any mode might begin."""

    run: Run
    choice: Choice
    tokens: int  # of the run, when it began; so below
    forwards: int
    milliseconds: float


class Auto:
    """One step of the chosen mode a call: a block, a round or a token."""

    starts_from_logits = True

    def __init__(self, *, milliseconds: Callable[[Clock], float] = measured_milliseconds) -> None:
        """`milliseconds` says what forwards have cost."""
        self._milliseconds = milliseconds
        self._chooser: Chooser | None = None
        self._stretch: _Stretch | None = None

    def block(self, run: Run) -> Iterator[Event]:
        """A step; chooses anew after a block of tokens, and where a probe turns out to be slow."""
        chooser = self._chooser_of(run)
        stretch = self._stretch_of(run, chooser)
        choice, left = stretch.choice, None
        with closing(_events(MODES[choice.mode], run)) as events:
            for event in events:
                yield event
                if choice.is_probe and choice.mode == "denoise" and isinstance(event, PassDone):
                    # A preview writes no state, so the block may be left after it.
                    spent = self._done(stretch).milliseconds
                    thought = _projection(run, event, milliseconds=spent)
                    if thought is not None and chooser.is_worse(thought):
                        left = thought
                        break
        done = self._done(stretch)
        if run.finish_reason == "cancelled":
            self._stretch = None
        elif left is not None or _ends(run, choice, done, chooser):
            self._stretch = None
            if choice.mode == "ar":  # the first token of an answer costs it nothing
                done = replace(done, tokens=done.forwards)
            chooser.record(choice, left or done)
            run.auto = chooser.use()

    def _chooser_of(self, run: Run) -> Chooser:
        """The one that knows the modes of this run; a new one where those have changed."""
        modes = run.settings.auto
        if self._chooser is None or self._chooser.modes != modes:
            self._chooser = Chooser(modes)
            self._stretch = None
        return self._chooser

    def _stretch_of(self, run: Run, chooser: Chooser) -> _Stretch:
        """The one that goes on, or a new one."""
        if self._stretch is None or self._stretch.run is not run:
            choice, clock = chooser.choose(), run.clock
            self._stretch = _Stretch(
                run, choice, len(run.tokens), clock.forwards, self._milliseconds(clock)
            )
            run.keeps_logits = True
            run.mode = choice.mode
            run.trace_choice(mode=choice.mode, is_probe=choice.is_probe, why=choice.why)
        return self._stretch

    def _done(self, stretch: _Stretch) -> Step:
        """What a stretch has come to by now."""
        run = stretch.run
        return Step(
            len(run.tokens) - stretch.tokens,
            run.clock.forwards - stretch.forwards,
            self._milliseconds(run.clock) - stretch.milliseconds,
        )


def _ends(run: Run, choice: Choice, done: Step, chooser: Chooser) -> bool:
    """Whether a stretch has told enough."""
    if choice.mode == "denoise" or run.finish_reason is not None:
        return True
    if choice.is_probe and done.forwards:
        # One forward says all about `ar`; of `draft`, a round that twice its tokens would not save.
        hopeful = replace(done, tokens=GROWTH * done.tokens)
        if choice.mode == "ar" or chooser.is_worse(hopeful):
            return True
    return done.tokens >= run.model.config.block_size


def _projection(run: Run, event: PassDone, *, milliseconds: float) -> Step | None:
    """What a block would come to, from its last pass; None where it has none to come."""
    rows = rows_that_count(event.tokens, run.settings)
    masks = event.tokens[:rows].count(run.settings.mask_token_id)
    if not masks:
        return None
    return projected(
        rows=rows,
        resolved=rows - masks,
        passes=event.pass_number + 1,
        milliseconds=milliseconds,
    )


def _events(mode: Mode, run: Run) -> Generator[Event, None, None]:
    """The events of a block, which may be left at any of them."""
    yield from mode.block(run)
