"""`draft`: a preview proposes the tokens behind the pending one, a causal forward verifies them.

The verify keeps a record of its rows, so that the state after exactly the accepted ones is made
without running the layers again. With `accept` `exact` the text is that of `ar`.
"""

import time
from collections.abc import Sequence

from clover_local.decoding.autoregressive import end_loop, next_token
from clover_local.decoding.events import BlockCommitted, EventStream, PassDone
from clover_local.decoding.result import EmittedToken, Fixed, Round, emitted_length
from clover_local.decoding.run import Run

MODE = "draft"
DRAFT, ACCEPTED, BOUNDARY = "draft", "accepted", "boundary"
"""Reasons in the trace."""


class Draft:
    """One round a call. The last emitted token stays pending: the next round verifies behind it."""

    starts_from_logits = True

    def block(self, run: Run) -> EventStream:
        """Emits accepted drafts and the boundary token; at the very start, one picked token.

        The accepted rows are committed first: whatever a listener has seen as emitted is in the
        state, but for the last token.
        """
        if run.stop_requested():
            return
        if run.pending is None:
            yield next_token(run, mode=MODE, index=len(run.rounds))
            return
        pending, start, index = run.pending, run.state.length + 1, len(run.rounds)
        allowed = run.settings.max_new_tokens - len(run.tokens)
        width = fitting_width(run.settings.draft_width, room=min(allowed, run.room))
        drafts: list[int] = []
        if width > 1:
            event = _propose(run, pending, width=width, index=index)
            drafts = list(event.tokens)
            yield event
            if run.stop_requested():
                return
        until_look = run.guard.until_look(run.controls.response)
        if until_look is not None:
            allowed = min(allowed, until_look)
        emitted = _verify(run, [pending, *drafts], allowed=allowed, index=index)
        yield BlockCommitted(index, start, emitted)


def fitting_width(width: int, *, room: int) -> int:
    """`width`, halved until it is at most `room`, at least 1."""
    while width > max(room, 1):
        width //= 2
    return width


def _propose(run: Run, pending: int, *, width: int, index: int) -> PassDone:
    """One preview; the event's tokens are the drafts."""
    began, start = time.perf_counter(), run.state.length + 1
    masks = [run.settings.mask_token_id] * (width - 1)
    output = run.preview([pending, *masks])
    statistics = run.propose(output, block=[pending, *masks])
    tokens = statistics.token.tolist()
    seconds = time.perf_counter() - began
    run.clock.preview_seconds += seconds
    run.trace_pass(
        statistics,
        block_before=masks,
        rows=range(width - 1),
        reasons=[DRAFT] * (width - 1),
        pass_number=0,
        output=output,
        milliseconds=1000 * seconds,
    )
    fixed = tuple(map(Fixed, range(width - 1), tokens, statistics.confidence.tolist()))
    return PassDone(index, start, 0, tuple(tokens), fixed, 1000 * seconds, fixed)


def _verify(run: Run, rows: Sequence[int], *, allowed: int, index: int) -> tuple[int, ...]:
    """Verifies the drafts behind the pending token, commits and emits; returns what is emitted."""
    began, drafts = time.perf_counter(), rows[1:]
    output = run.verify(rows)
    judged = run.judge(output, drafts=drafts)
    tokens = judged.statistics.token.tolist()
    length = emitted_length(tokens, stop_ids=run.settings.stop_ids, allowed=allowed)
    start = run.state.length
    # All emitted tokens but the last, behind the one that was pending.
    run.accept(output.record, length)
    seconds = time.perf_counter() - began
    run.clock.verify_seconds += seconds
    run.trace_verify(
        judged,
        start=start,
        tokens=rows,
        reasons=[ACCEPTED] * judged.accepted + [BOUNDARY],
        output=output,
        milliseconds=1000 * seconds,
    )
    run.rounds.append(Round(len(rows), tuple(drafts), judged.accepted, judged.boundary))
    confidences = judged.statistics.confidence.tolist()
    pairs = zip(tokens[:length], confidences[:length], strict=True)
    run.emit([EmittedToken(token, sure, 0, index, MODE) for token, sure in pairs])
    run.pending = tokens[length - 1]
    end_loop(run)
    run.close_at_context_end()
    return tuple(tokens[:length])
