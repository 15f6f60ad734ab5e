"""The mode `auto` as a trace has it: the same modes at the same places, whatever the clock says."""

from contextlib import closing
from typing import Protocol

from clover_local.decoding.auto.auto import MODES
from clover_local.decoding.denoise import rows_that_count
from clover_local.decoding.events import EventStream, PassDone
from clover_local.decoding.run import Run
from clover_local.traces.read import RecordedRun, Step


class Progress(Protocol):
    """Whatever counts the steps of a run."""

    @property
    def steps(self) -> int:
        """Forwards that picked tokens, so far."""


class Schedule:
    """Stands in for `auto`: every step runs in the mode that its record names."""

    starts_from_logits = True

    def __init__(self, recorded: RecordedRun, progress: Progress) -> None:
        """`progress`: of the run that is made now."""
        self._recorded = recorded.steps
        self._progress = progress

    def block(self, run: Run) -> EventStream:
        """A block, a round or a token; a block that had been left is left after the same pass."""
        step = self._next() or self._recorded[-1]  # a run that is longer now goes on as it ended
        run.keeps_logits = True
        if step.mode == "denoise" or not step.before:  # a pick from the logits of all before
            run.commit_pending(logits=True)
        run.mode = step.mode
        with closing(MODES[step.mode].block(run)) as events:
            for event in events:
                yield event
                if (
                    step.mode == "denoise"
                    and isinstance(event, PassDone)
                    and self._left(event, run)
                ):
                    return

    def _next(self) -> Step | None:
        """The record of the next step; None behind the last."""
        done = self._progress.steps
        return self._recorded[done] if done < len(self._recorded) else None

    def _left(self, event: PassDone, run: Run) -> bool:
        """Whether the recorded run left the block after this pass, with rows that were masked."""
        following, settings = self._next(), run.settings
        if following is None:
            return False
        goes_on = following.mode == "denoise" and following.number == event.pass_number + 1
        counting = event.tokens[: rows_that_count(event.tokens, settings)]
        return not goes_on and settings.mask_token_id in counting
