"""Watches an answer: what a mode did, what that cost, what other modes would have needed."""

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field, replace

from clover_local.decoding.auto.chooser import Choice, Chooser, Stretch, projected
from clover_local.decoding.auto.foresight import (
    Forwards,
    PassesForRounds,
    rounds_for_block,
    unsure,
)
from clover_local.decoding.denoise import rows_that_count
from clover_local.decoding.events import BlockCommitted, Event, EventStream, PassDone
from clover_local.decoding.result import Clock, emitted_length
from clover_local.decoding.run import Mode, Run
from clover_local.decoding.settings import Settings

Costs = Callable[[Clock], tuple[float, float]]
"""Milliseconds that an answer's previews have taken so far, and its commits and verifies."""


def measured_costs(clock: Clock) -> tuple[float, float]:
    """By the wall clock."""
    return 1000 * clock.preview_seconds, 1000 * (clock.commit_seconds + clock.verify_seconds)


@dataclass
class _Open:
    """What is judged at once, while it lasts: about a block of tokens, from between two steps."""

    run: Run
    choice: Choice
    tokens: int  # of the run, when it began; so below
    previews: int
    commits: int
    costs: tuple[float, float]
    passes: list[PassDone] = field(default_factory=list)
    """Of the block in progress."""
    unsure_rows: int = 0
    """Of the rounds so far: emitted tokens that their previews were not sure of."""


@dataclass(frozen=True)
class _Yields:
    """Settings on which it depends how many tokens a forward of a mode makes."""

    auto: tuple[str, ...]
    sampler: str
    threshold: float
    draft_width: int
    accept: str
    is_greedy: bool

    @classmethod
    def of(cls, settings: Settings) -> "_Yields":
        """Those of a run."""
        return cls(
            auto=settings.auto,
            sampler=settings.sampler,
            threshold=settings.threshold,
            draft_width=settings.draft_width,
            accept=settings.accept,
            is_greedy=settings.temperature == 0,
        )


class Watch:
    """What is known of the modes of a conversation, and the stretch in progress."""

    def __init__(self, *, costs: Costs = measured_costs) -> None:
        """`costs` says what forwards have cost."""
        self.passes = PassesForRounds()
        self._costs = costs
        self._chooser: Chooser | None = None
        self._for: _Yields | None = None
        self._open: _Open | None = None
        self.has_left = False
        """Whether the last step left its block: what follows has to be another mode."""

    def chooser(self, settings: Settings) -> Chooser:
        """The one that knows the modes of `auto`; a new one where what they do has changed."""
        what = _Yields.of(settings)
        if self._chooser is None or self._for != what:
            self._chooser, self._for = Chooser(settings.auto), what
            self._open = None
        return self._chooser

    def stretch(self, run: Run) -> Choice | None:
        """The choice of the stretch that this run is in; None between two."""
        return self._open.choice if self._open is not None and self._open.run is run else None

    def begin(self, run: Run, choice: Choice) -> None:
        """Opens a stretch."""
        clock = run.clock
        self._open = _Open(
            run=run,
            choice=choice,
            tokens=len(run.tokens),
            previews=clock.previews,
            commits=clock.commits + clock.verifies,
            costs=self._costs(clock),
        )

    def step(self, mode: Mode, run: Run, *, may_leave: bool = False) -> EventStream:
        """The events of a block, a round or a token of the stretch in progress; may close it.

        With `may_leave` a block of `denoise` is left where another mode is sooner done with its
        tokens than the passes that are still to come: a preview writes no state.

        Raises:
            ValueError: no stretch is open.
        """
        stretch, left, self.has_left = self._open, None, False
        if stretch is None:
            raise ValueError("no stretch is open: `begin` opens one")
        choice, chooser = stretch.choice, self.chooser(run.settings)
        with closing(mode.block(run)) as events:
            for event in events:
                yield event
                _look(stretch, event)
                if may_leave and choice.mode == "denoise" and isinstance(event, PassDone):
                    left = _worth_leaving(event, self._done(stretch), run, chooser)
                    if left is not None:
                        self.has_left = True
                        break
        done = self._done(stretch)
        if run.finish_reason == "cancelled":
            self._open = None
        elif left is not None or _ends(run, choice, done):
            self._open = None
            foreseen = {"denoise": left} if left is not None else self._foreseen(stretch, done)
            chooser.record(choice, done, foreseen)

    def _done(self, stretch: _Open) -> Stretch:
        """What a stretch has come to by now."""
        run, before = stretch.run, stretch.costs
        clock, now = run.clock, self._costs(run.clock)
        commits = clock.commits + clock.verifies - stretch.commits
        tokens = len(run.tokens) - stretch.tokens
        if stretch.choice.mode == "ar":  # the first token of an answer costs it nothing
            tokens = commits
        return Stretch(
            Forwards(tokens, clock.previews - stretch.previews, commits),
            preview_ms=now[0] - before[0],
            commit_ms=now[1] - before[1],
        )

    def _foreseen(self, stretch: _Open, done: Stretch) -> dict[str, Forwards]:
        """What `draft` would have needed for a block, and `denoise` for some rounds."""
        run, settings = stretch.run, stretch.run.settings
        emitted = [token.token for token in run.tokens[stretch.tokens :]]
        if stretch.choice.mode == "denoise" and emitted:
            width = settings.draft_width
            rounds = rounds_for_block(
                stretch.passes, emitted, width=width, threshold=settings.threshold
            )
            self.passes.learn(passes=len(stretch.passes), unsure_rows=rounds.unsure_rows)
            previews = rounds.count if width > 1 else 0
            return {"draft": Forwards(len(emitted), previews, rounds.count)}
        if stretch.choice.mode == "draft" and done.forwards.previews:
            forwards = self.passes.forwards(
                tokens=len(emitted),
                unsure_rows=stretch.unsure_rows,
                block_size=run.model.config.block_size,
                is_end=run.finish_reason is not None,
            )
            return {"denoise": forwards}
        return {}


def _look(stretch: _Open, event: Event) -> None:
    """Keeps of an event what foresight needs."""
    if isinstance(event, PassDone):
        if event.pass_number == 0:  # also where the loop guard tries a block again
            stretch.passes.clear()
        stretch.passes.append(event)
    elif isinstance(event, BlockCommitted) and stretch.choice.mode == "draft" and stretch.passes:
        stretch.unsure_rows += unsure(
            stretch.passes[-1].picked,
            rows=len(event.tokens),
            threshold=stretch.run.settings.threshold,
        )
        stretch.passes.clear()


def _worth_leaving(event: PassDone, done: Stretch, run: Run, chooser: Chooser) -> Forwards | None:
    """What a block would come to, where another mode is sooner done with it; else None."""
    settings = run.settings
    rows, passes = rows_that_count(event.tokens, settings), event.pass_number + 1
    masks = event.tokens[:rows].count(settings.mask_token_id)
    if not masks:
        return None
    thought = projected(rows=rows, resolved=rows - masks, passes=passes)
    worth = emitted_length(
        event.tokens,
        stop_ids=settings.stop_ids,
        allowed=settings.max_new_tokens - len(run.tokens),
    )
    to_come = thought.previews - passes + thought.commits
    each = done.preview_ms / done.forwards.previews
    sooner = chooser.milliseconds_besides("denoise", tokens=worth) < to_come * each
    return replace(thought, tokens=worth) if sooner else None


def _ends(run: Run, choice: Choice, done: Stretch) -> bool:
    """Whether a stretch has told enough: a probe is one forward of `ar` or one round of `draft`."""
    if choice.mode == "denoise" or run.finish_reason is not None:
        return True
    if choice.is_probe and done.forwards.commits:
        return True
    return done.forwards.tokens >= run.model.config.block_size
