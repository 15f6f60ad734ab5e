"""`denoise`: previews of a block of masks until no mask is left, then one commit.

This is the release's own procedure, the one the model was evaluated with.
"""

import time
from collections.abc import Generator, Sequence

from clover_local.decoding.events import BlockCommitted, Event, EventStream, PassDone
from clover_local.decoding.repetition.guard import Verdict
from clover_local.decoding.result import Block, EmittedToken, Fixed, emitted_length
from clover_local.decoding.run import Run
from clover_local.decoding.settings import Settings


class Denoise:
    """One block a call."""

    starts_from_logits = False

    def block(self, run: Run) -> EventStream:
        """Resolves one block, commits what is emitted of it, then emits it.

        Commit comes first: whatever a listener has seen as emitted is in the state.
        """
        run.commit_pending(logits=False)
        start, index = run.state.length, len(run.blocks)
        verdict = Verdict.RETRY
        while verdict is Verdict.RETRY:
            passes: list[tuple[Fixed, ...]] = []
            block = yield from _resolve(run, passes, index=index)
            if run.finish_reason is not None or run.stop_requested():
                return
            length = emitted_length(
                block,
                stop_ids=run.settings.stop_ids,
                allowed=run.settings.max_new_tokens - len(run.tokens),
            )
            verdict = run.guard.judge(run.controls.response, block[:length])
            if verdict is Verdict.STOP:
                length = run.guard.worth_keeping(run.controls.response, block[:length])
            run.use(run.guard.settings)
        if verdict is Verdict.STOP and not length:
            run.finish_reason = "repetition"
            return
        run.commit(block[:length], logits=False)
        run.blocks.append(Block(start, tuple(block[:length]), tuple(passes)))
        run.emit(_emitted(passes, length=length, block=index))
        if verdict is Verdict.STOP and run.finish_reason is None:
            run.finish_reason = "repetition"
        run.close_at_context_end()
        yield BlockCommitted(index, start, tuple(block[:length]))


def _resolve(
    run: Run, passes: list[tuple[Fixed, ...]], *, index: int
) -> Generator[Event, None, list[int]]:
    """Passes over a block of masks until none is left that counts; each is added to `passes`.

    Stops in between when it should; the block then has masks.
    """
    start, mask = run.state.length, run.settings.mask_token_id
    # All `block_size` rows even where max_new_tokens is nearer: the model knows such blocks.
    block = [mask] * min(run.model.config.block_size, run.room)
    while mask in block[: rows_that_count(block, run.settings)]:
        if run.stop_requested():
            return block
        began = time.perf_counter()
        number = len(passes)
        picked, fixed = one_pass(run, block, pass_number=number)
        passes.append(fixed)
        milliseconds = 1000 * (time.perf_counter() - began)
        yield PassDone(index, start, number, tuple(block), fixed, milliseconds, picked)
    return block


def rows_that_count(block: Sequence[int], settings: Settings) -> int:
    """Rows of the block that have to be resolved: with `eos_order`, those before a stop token."""
    stops = settings.stop_ids if settings.eos_order else ()
    return next((row for row, token in enumerate(block) if token in stops), len(block))


def one_pass(
    run: Run, block: list[int], *, pass_number: int
) -> tuple[tuple[Fixed, ...], tuple[Fixed, ...]]:
    """One preview; writes the accepted tokens into `block`; returns all picked ones, and these.

    Raises:
        RuntimeError: the rule accepted no row, which would never end.
    """
    began = time.perf_counter()
    before = tuple(block)
    masked = [row for row, token in enumerate(block) if token == run.settings.mask_token_id]
    output = run.preview(block)
    statistics, accepted = run.pick_block(output, block=block, rows=masked, pass_number=pass_number)
    tokens, confidences = statistics.token.tolist(), statistics.confidence.tolist()
    picked = tuple(map(Fixed, masked, tokens, confidences))
    accepts = accepted.accept.tolist()
    fixed = tuple(each for each, accept in zip(picked, accepts, strict=True) if accept)
    if not fixed:
        raise RuntimeError(f"pass {pass_number} fixed none of {len(masked)} masked rows")
    for row in fixed:
        block[row.row] = row.token
    seconds = time.perf_counter() - began
    run.clock.preview_seconds += seconds
    run.trace_pass(
        statistics,
        block_before=before,
        rows=masked,
        reasons=accepted.reasons,
        pass_number=pass_number,
        output=output,
        milliseconds=1000 * seconds,
    )
    return picked, fixed


def _emitted(passes: list[tuple[Fixed, ...]], *, length: int, block: int) -> list[EmittedToken]:
    """The first `length` rows of a resolved block, in order."""
    rows = [
        (fixed.row, EmittedToken(fixed.token, fixed.confidence, number, block, "denoise"))
        for number, of_pass in enumerate(passes)
        for fixed in of_pass
    ]
    return [token for row, token in sorted(rows, key=lambda item: item[0]) if row < length]
