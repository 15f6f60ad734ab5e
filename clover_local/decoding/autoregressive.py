"""`ar`: causal decoding, one token a forward, with the same controls and pick as every mode."""

import time

from clover_local.decoding.events import BlockCommitted, EventStream
from clover_local.decoding.repetition.guard import Verdict
from clover_local.decoding.result import EmittedToken
from clover_local.decoding.run import Run

NEXT_TOKEN = "next_token"
"""The reason, in the trace, of a token that follows the committed ones."""


class Autoregressive:
    """One token a call. The last emitted token stays pending: the next forward commits it."""

    starts_from_logits = True

    def block(self, run: Run) -> EventStream:
        """Commits the pending token and emits the token that follows it."""
        if run.stop_requested():
            return
        run.commit_pending(logits=True)
        yield next_token(run, mode="ar", index=len(run.tokens))


def next_token(run: Run, *, mode: str, index: int) -> BlockCommitted:
    """Emits the token that follows the last committed one, and leaves it pending.

    Raises:
        RuntimeError: nobody asked for the logits of that one.
    """
    if run.next_logits is None:
        raise RuntimeError(f"{mode} has no logits of the last committed token to start from")
    began, start = time.perf_counter(), run.state.length
    statistics = run.pick_next(run.next_logits)
    token, confidence = int(statistics.token), float(statistics.confidence)
    seconds = time.perf_counter() - began
    run.clock.commit_seconds += seconds
    run.trace_pass(
        statistics,
        block_before=(),
        rows=[0],
        reasons=(NEXT_TOKEN,),
        pass_number=0,
        output=None,
        milliseconds=1000 * seconds,
    )
    run.emit([EmittedToken(token, confidence, 0, index, mode)])
    run.pending = token
    end_loop(run)
    run.close_at_context_end()
    return BlockCommitted(index, start, (token,))


def end_loop(run: Run) -> None:
    """What the loop guard does about tokens that were emitted one by one."""
    verdict = run.guard.judge_shown(run.controls.response)
    if verdict is Verdict.STOP and run.finish_reason is None:
        run.finish_reason = "repetition"
    run.use(run.guard.settings)
