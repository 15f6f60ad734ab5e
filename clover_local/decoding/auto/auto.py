"""`auto`: runs the mode that a `Chooser` names, stretch by stretch, and tells it what that cost.

All modes share the committed state, so any of them may follow any other. What is measured outlives
an answer: the next one begins with the mode that was the fastest.
"""

from collections.abc import Mapping

from clover_local.decoding.auto.watch import Costs, Watch, measured_costs
from clover_local.decoding.autoregressive import Autoregressive, next_token
from clover_local.decoding.denoise import Denoise
from clover_local.decoding.events import EventStream
from clover_local.decoding.run import Mode, Run
from clover_local.decoding.speculation.draft import Draft

MODES: Mapping[str, Mode] = {"denoise": Denoise(), "ar": Autoregressive(), "draft": Draft()}


class ProbeOfAutoregressive:
    """One forward of `ar`, and no token pending behind it, which the next mode would commit."""

    starts_from_logits = True

    def block(self, run: Run) -> EventStream:
        """Commits the pending token; where there is none, one that is picked first."""
        if run.stop_requested():
            return
        if run.pending is None:
            yield next_token(run, mode="ar", index=len(run.tokens))
        if run.finish_reason is None:
            run.commit_pending(logits=True)


PROBE_OF_AR = ProbeOfAutoregressive()


class Auto:
    """One step of the chosen mode a call: a block, a round or a token."""

    starts_from_logits = True

    def __init__(self, *, costs: Costs = measured_costs) -> None:
        """`costs` says what forwards have cost."""
        self.watch = Watch(costs=costs)

    def block(self, run: Run) -> EventStream:
        """A step; chooses anew after a block of tokens, and where a probe turns out to be slow."""
        chooser, choice = self.watch.chooser(run.settings), self.watch.stretch(run)
        if choice is None:
            choice = chooser.choose(besides="denoise" if self.watch.has_left else None)
            run.keeps_logits = True
            if choice.mode == "denoise":  # what another mode has left is not its cost
                run.commit_pending(logits=True)
            run.mode = choice.mode
            run.trace_choice(mode=choice.mode, is_probe=choice.is_probe, why=choice.why)
            self.watch.begin(run, choice)
        mode = PROBE_OF_AR if choice.is_probe and choice.mode == "ar" else MODES[choice.mode]
        yield from self.watch.step(mode, run, may_leave=True)
        if self.watch.stretch(run) is None and run.finish_reason != "cancelled":
            chooser.settle()
            run.auto = chooser.use()
