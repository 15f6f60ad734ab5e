"""A recorded run again: the first pass whose rows or tokens are others than in the trace.

Milliseconds and confidences differ from machine to machine and are not compared: what a pass does
to the text is which rows get which tokens. A run of `auto` goes by the modes that the trace has.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from clover_local.decoding.settings import Settings
from clover_local.generate import Generator
from clover_local.traces.read import RecordedRun, Step, step_of
from clover_local.traces.schedule import Schedule


@dataclass(frozen=True)
class Difference:
    """Where a replay left the trace; a side that had ended by then has no step."""

    run: int  # of the trace, from 0
    index: int  # of the step in its run, from 0
    recorded: Step | None
    replayed: Step | None
    recorded_end: str | None = None  # its finish reason
    replayed_end: str | None = None

    @property
    def rows(self) -> tuple[int, ...]:
        """The rows that got another token, or a token on one side only."""
        sides = [set(_pairs(step)) for step in (self.recorded, self.replayed)]
        return tuple(sorted({row for row, _ in sides[0] ^ sides[1]}))

    def sentence(self) -> str:
        """What differs, for a person."""
        here = self.recorded or self.replayed
        if here is None:
            place, what = "at the end", f"{self.replayed_end}, the trace has {self.recorded_end}"
            if self.replayed_end == self.recorded_end:
                what = f"{self.replayed_end}, with other token ids than the trace has"
        else:
            name = "pass" if here.kind == "pass" else "verify of round"
            number = here.number if here.kind == "pass" else here.block
            place = f"block {here.block}, {name} {number}"
            rows = self.rows
            what = (
                f"rows {_listed(rows)}: {_tokens(self.replayed, rows, self.replayed_end)}, "
                f"the trace has {_tokens(self.recorded, rows, self.recorded_end)}"
                if rows or None in (self.recorded, self.replayed)
                else "its place, the tokens before it or the drafts accepted are others"
            )
        return f"run {self.run}, {place}: {what}"


@dataclass(frozen=True)
class Replay:
    """What came of it; `passes` were run, the differing one among them."""

    passes: int
    difference: Difference | None


class Comparison:
    """Hears the records of a run that is made again, up to the first difference."""

    def __init__(self, recorded: RecordedRun, *, run: int) -> None:
        self.model, self.model_hash = recorded.header.model, recorded.header.model_hash
        self.steps = 0
        self.difference: Difference | None = None
        self._recorded = recorded
        self._run = run

    def is_complete(self) -> bool:
        """Whether nothing is left to compare: it differs, or a run that was cut off is over."""
        done = self.steps == len(self._recorded.steps) and not self._recorded.ended
        return done or self.difference is not None

    def write(self, record: Mapping[str, object]) -> None:
        """Compares one record with its counterpart."""
        if self.is_complete():
            return
        recorded, kind = self._recorded, record["record"]
        if kind in ("pass", "verify"):
            step = step_of(record)
            expected = recorded.steps[self.steps] if self.steps < len(recorded.steps) else None
            if expected is None or expected.choice != step.choice:
                self._differ(expected, step, None)
            self.steps += 1
        elif kind == "end" and recorded.ended:
            end = str(record["finish_reason"])
            if self.steps < len(recorded.steps):
                self._differ(recorded.steps[self.steps], None, end)
            elif end != recorded.finish_reason or record["token_ids"] != [*recorded.token_ids]:
                self._differ(None, None, end)

    def _differ(self, recorded: Step | None, replayed: Step | None, end: str | None) -> None:
        reason = self._recorded.finish_reason
        self.difference = Difference(self._run, self.steps, recorded, replayed, reason, end)


def replay(
    runs: Sequence[RecordedRun], generator: Generator, settings: Sequence[Settings]
) -> Replay:
    """Runs every recorded run again with its settings, in order, until one differs.

    Raises:
        CloverError: as `Generator.run`.
    """
    passes, auto = 0, generator.modes["auto"]
    for number, (recorded, own) in enumerate(zip(runs, settings, strict=True)):
        comparison = Comparison(recorded, run=number)
        generator.settings = own
        generator.trace = comparison
        generator.should_stop = comparison.is_complete
        if recorded.steps:
            generator.modes["auto"] = Schedule(recorded, comparison)
        try:
            for _ in generator.run(recorded.header.prompt_ids):
                pass
        finally:
            generator.modes["auto"] = auto
        passes += comparison.steps
        if comparison.difference is not None:
            return Replay(passes, comparison.difference)
    return Replay(passes, None)


def _pairs(step: Step | None) -> list[tuple[int, int]]:
    return [] if step is None else [(row.row, row.token) for row in step.picked]


def _tokens(step: Step | None, rows: Sequence[int], end: str | None) -> str:
    if step is None:
        return f"the end ({end})" if end else "no more passes"
    found = dict(_pairs(step))
    return "tokens " + _listed([found.get(row, "none") for row in rows])


def _listed(values: Sequence[object]) -> str:
    return ", ".join(map(str, values)) or "none"
