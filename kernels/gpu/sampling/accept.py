"""accept = confidence > threshold, else the most confident masked row; block[accept] = token.

The `threshold` rule (clover_local/decoding/rules/threshold.py), with what follows from it before
the next pass: the block, the bias of the end of thinking, the pass number. What the host wants to
know of a pass is packed into one tensor, so that one small copy brings it:

    report[row]   0 token   1 confidence   2 raw confidence   3 entropy   4..8 top ids
                  9..13 their probabilities   14 reason   15 masked rows left in the block

int32; of float32 numbers their bits. One program has all rows.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from clover_local.kernels.gpu.check import check_dense
from clover_local.kernels.gpu.gate import GateCase
from clover_local.kernels.gpu.sampling.sample import TOP, SampledRows

WORDS = 16
TOKEN, CONFIDENCE, RAW_CONFIDENCE, ENTROPY = range(4)
TOP_IDS, TOP_PROBABILITIES, REASON, MASKED_LEFT = 4, 4 + TOP, 4 + 2 * TOP, 5 + 2 * TOP
"""Words of a report's row."""
STAYS, ABOVE, MOST_CONFIDENT = 0, 1, 2
"""Reasons."""
WARPS = 1


@triton.jit
def _pack(
    token,
    confidence,
    raw_confidence,
    entropy,
    top_ids,
    top_probabilities,
    report,
    row,
    inside,
    TOP: tl.constexpr,
    ROOM: tl.constexpr,
    WORDS: tl.constexpr,
):
    """Words 0 to 13 of every row; returns its token and confidence."""
    picked = tl.load(token + row, mask=inside, other=0)
    sure = tl.load(confidence + row, mask=inside, other=0.0)
    raw = tl.load(raw_confidence + row, mask=inside, other=0.0)
    nats = tl.load(entropy + row, mask=inside, other=0.0)
    report += row * WORDS
    tl.store(report, picked.to(tl.int32), mask=inside)
    tl.store(report + 1, sure.to(tl.int32, bitcast=True), mask=inside)
    tl.store(report + 2, raw.to(tl.int32, bitcast=True), mask=inside)
    tl.store(report + 3, nats.to(tl.int32, bitcast=True), mask=inside)
    for k in range(TOP):
        column = tl.load(top_ids + row * TOP + k, mask=inside, other=0)
        share = tl.load(top_probabilities + row * TOP + k, mask=inside, other=0.0)
        tl.store(report + 4 + k, column.to(tl.int32), mask=inside)
        tl.store(report + 4 + ROOM + k, share.to(tl.int32, bitcast=True), mask=inside)
    return picked, sure


@triton.jit(do_not_specialize=["rows"])
def report_kernel(
    token,
    confidence,
    raw_confidence,
    entropy,
    top_ids,
    top_probabilities,
    report,
    rows,
    TOP: tl.constexpr,
    ROOM: tl.constexpr,
    WORDS: tl.constexpr,
    BLOCK_B: tl.constexpr,
):
    """The statistics alone."""
    row = tl.arange(0, BLOCK_B)
    inside = row < rows
    _pack(
        token,
        confidence,
        raw_confidence,
        entropy,
        top_ids,
        top_probabilities,
        report,
        row,
        inside,
        TOP,
        ROOM,
        WORDS,
    )
    nothing = tl.zeros([BLOCK_B], tl.int32)
    tl.store(report + row * WORDS + WORDS - 2, nothing, mask=inside)
    tl.store(report + row * WORDS + WORDS - 1, nothing, mask=inside)


@triton.jit(do_not_specialize=["rows", "mask_token_id", "think_end_n"])
def accept_kernel(
    token,
    confidence,
    raw_confidence,
    entropy,
    top_ids,
    top_probabilities,
    block,
    threshold,
    think_end_ids,
    think_end_bias,
    pass_number,
    report,
    rows,
    mask_token_id,
    think_end_n,
    TOP: tl.constexpr,
    ROOM: tl.constexpr,
    WORDS: tl.constexpr,
    BLOCK_B: tl.constexpr,
):
    """The statistics, the rule, and what follows from it."""
    row = tl.arange(0, BLOCK_B)
    inside = row < rows
    picked, sure = _pack(
        token,
        confidence,
        raw_confidence,
        entropy,
        top_ids,
        top_probabilities,
        report,
        row,
        inside,
        TOP,
        ROOM,
        WORDS,
    )
    held = tl.load(block + row, mask=inside, other=-1)
    masked = inside & (held == mask_token_id)
    broken = tl.max((masked & (sure != sure)).to(tl.int32), axis=0)
    above = masked & (sure > tl.load(threshold))
    some = tl.max(above.to(tl.int32), axis=0)
    candidate = tl.where(masked, sure, -1.0)
    best = tl.max(candidate, axis=0)
    lowest = tl.min(tl.where(masked & (candidate == best), row, BLOCK_B), axis=0)
    accepted = tl.where(some == 1, above, row == lowest) & (broken == 0)

    tl.store(block + row, picked, mask=accepted)
    reason = tl.where(accepted, 2 - some, 0)
    left = tl.sum((masked & (accepted == 0)).to(tl.int32), axis=0)
    tl.store(report + row * WORDS + WORDS - 2, reason, mask=inside)
    tl.store(report + row * WORDS + WORDS - 1, left + row * 0, mask=inside)
    think_end = tl.load(think_end_ids, mask=think_end_n > 0, other=-1)
    ended = tl.max((accepted & (picked == think_end)).to(tl.int32), axis=0)
    tl.store(think_end_bias + row, tl.zeros([BLOCK_B], tl.float32), mask=inside & (ended == 1))
    tl.atomic_add(pass_number, 1 - broken)


def report_rows(sampled: SampledRows, *, report: Tensor) -> None:
    """Packs the numbers of all rows; reason and masked rows left are 0.

    Args:
        sampled: of `sample` and `draw`.
        report: [rows, WORDS] int32; overwritten.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit.
    """
    rows, top = _check(sampled, report=report)
    report_kernel[(1,)](
        token=sampled.token,
        confidence=sampled.confidence,
        raw_confidence=sampled.raw_confidence,
        entropy=sampled.entropy,
        top_ids=sampled.top_ids,
        top_probabilities=sampled.top_probabilities,
        report=report,
        rows=rows,
        TOP=top,
        ROOM=TOP,
        WORDS=WORDS,
        BLOCK_B=triton.next_power_of_2(rows),
        num_warps=WARPS,
    )


def accept(
    sampled: SampledRows,
    *,
    block: Tensor,
    mask_token_id: int,
    threshold: Tensor,
    think_end_ids: Tensor,
    think_end_bias: Tensor,
    pass_number: Tensor,
    report: Tensor,
) -> None:
    """Accepts masked rows and packs the numbers of all rows.

    Where a masked row's confidence is NaN, nothing is accepted and nothing but `report` changes.

    Args:
        sampled: the statistics of every row of the block.
        block: [rows] int64; accepted rows get their tokens.
        mask_token_id: what rows hold that may be accepted.
        threshold: [1] float32.
        think_end_ids: [0 or 1] int64.
        think_end_bias: [rows] float32; all 0 once an accepted token is in `think_end_ids`.
        pass_number: [1] int32; one more.
        report: [rows, WORDS] int32; overwritten.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit.
    """
    rows, top = _check(sampled, report=report)
    check_dense("block", block, shape=(rows,), like=report, dtype=torch.int64)
    check_dense("threshold", threshold, shape=(1,), like=report)
    ends = min(len(think_end_ids), 1)
    check_dense("think_end_ids", think_end_ids, shape=(ends,), like=report, dtype=torch.int64)
    check_dense("think_end_bias", think_end_bias, shape=(rows,), like=report)
    check_dense("pass_number", pass_number, shape=(1,), like=report, dtype=torch.int32)
    accept_kernel[(1,)](
        token=sampled.token,
        confidence=sampled.confidence,
        raw_confidence=sampled.raw_confidence,
        entropy=sampled.entropy,
        top_ids=sampled.top_ids,
        top_probabilities=sampled.top_probabilities,
        block=block,
        threshold=threshold,
        think_end_ids=think_end_ids,
        think_end_bias=think_end_bias,
        pass_number=pass_number,
        report=report,
        rows=rows,
        mask_token_id=mask_token_id,
        think_end_n=ends,
        TOP=top,
        ROOM=TOP,
        WORDS=WORDS,
        BLOCK_B=triton.next_power_of_2(rows),
        num_warps=WARPS,
    )


def _check(sampled: SampledRows, *, report: Tensor) -> tuple[int, int]:
    """The number of rows, and of the most probable tokens of each."""
    rows, top = sampled.top_ids.shape
    check_dense("report", report, shape=(rows, WORDS), like=sampled.token, dtype=torch.int32)
    check_dense("token", sampled.token, shape=(rows,), like=report, dtype=torch.int64)
    check_dense("top_ids", sampled.top_ids, shape=(rows, top), like=report, dtype=torch.int64)
    check_dense("top_probabilities", sampled.top_probabilities, shape=(rows, top), like=report)
    for name in ("confidence", "raw_confidence", "entropy"):
        check_dense(name, getattr(sampled, name), shape=(rows,), like=report)
    return rows, top


def gate_cases() -> tuple[GateCase, ...]:
    """A whole block."""
    types = dict.fromkeys(("token", "top_ids", "block", "think_end_ids"), "*i64")
    types |= dict.fromkeys(("confidence", "raw_confidence", "entropy", "threshold"), "*fp32")
    types |= dict.fromkeys(("top_probabilities", "think_end_bias"), "*fp32")
    types |= {"pass_number": "*i32", "report": "*i32"}
    types |= dict.fromkeys(("rows", "mask_token_id", "think_end_n"), "i32")
    return tuple(
        GateCase(
            name=name,
            fn=fn,
            signature={arg: types[arg] for arg in fn.arg_names if arg in types},
            constexprs={"TOP": TOP, "ROOM": TOP, "WORDS": WORDS, "BLOCK_B": 32},
            num_warps=WARPS,
            num_stages=1,
        )
        for name, fn in (("accept", accept_kernel), ("report", report_kernel))
    )
