"""p = softmax(controlled logits)[draft], row by row: what each row says of a token named before.

Defined by `ControlledRows.of_tokens` (clover_local/decoding/pick.py). Two words of a row's report
(`accept.py`) get it, where a pass of a block has its reason and the masked rows left:

    report[row]   14 probability of the draft   15 the same before the response controls
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from clover_local.kernels.gpu.check import check_dense
from clover_local.kernels.gpu.gate import GateCase
from clover_local.kernels.gpu.sampling.accept import MASKED_LEFT, REASON, WORDS
from clover_local.kernels.gpu.sampling.controls import (
    ControlTensors,
    check_controls,
    controlled_logits,
)
from clover_local.kernels.gpu.sampling.sample import Summary

PROBABILITY, RAW_PROBABILITY = REASON, MASKED_LEFT
"""Words of a report's row."""
WARPS = 1


@triton.jit
def drafts_kernel(
    logits,
    rows,
    codes,
    penalties,
    stop_bias,
    think_end_bias,
    totals,
    drafts,
    report,
    row_stride,
    V: tl.constexpr,
    WORDS: tl.constexpr,
):
    """One row."""
    row = tl.program_id(0).to(tl.int64)
    draft = tl.load(drafts + row)
    is_token = (draft >= 0) & (draft < V)
    column = tl.where(is_token, draft, 0)
    logits += tl.load(rows + row).to(tl.int64) * row_stride
    code = tl.load(codes + column)
    raw = tl.load(logits + column).to(tl.float32)
    x = controlled_logits(
        raw, code, penalties, tl.load(stop_bias + row), tl.load(think_end_bias + row)
    )
    raw = tl.where((code & 1) != 0, float("-inf"), raw)
    totals += row * 4
    share = tl.exp(x - tl.load(totals)) / tl.load(totals + 1)
    raw_share = tl.exp(raw - tl.load(totals + 2)) / tl.load(totals + 3)
    report += row * WORDS + WORDS - 2
    tl.store(report, tl.where(is_token, share, 0.0).to(tl.int32, bitcast=True))
    tl.store(report + 1, tl.where(is_token, raw_share, 0.0).to(tl.int32, bitcast=True))


def report_drafts(
    logits: Tensor,
    controls: ControlTensors,
    *,
    rows: Tensor,
    drafts: Tensor,
    summary: Summary,
    report: Tensor,
) -> None:
    """Writes what each row says of its draft into the report, behind `report_rows`.

    Args:
        logits: as given to `sample`, like `controls` and `rows`.
        controls: see there.
        rows: see there.
        drafts: [rows] int64; a row with a number that is no token gets zeros.
        summary: of `sample`.
        report: [rows, WORDS] int32; two words of each row are overwritten.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit.
    """
    count = len(rows)
    check_controls(controls, rows=count, device=logits.device)
    check_dense("drafts", drafts, shape=(count,), like=logits, dtype=torch.int64)
    check_dense("report", report, shape=(count, WORDS), like=logits, dtype=torch.int32)
    check_dense("totals", summary.totals, shape=(count, 4), like=logits)
    drafts_kernel[(count,)](
        logits=logits,
        rows=rows,
        codes=summary.codes,
        penalties=controls.penalties,
        stop_bias=controls.stop_bias,
        think_end_bias=controls.think_end_bias,
        totals=summary.totals,
        drafts=drafts,
        report=report,
        row_stride=logits.stride(0),
        V=logits.shape[1],
        WORDS=WORDS,
        num_warps=WARPS,
    )


def gate_cases() -> tuple[GateCase, ...]:
    """The real model's vocabulary."""
    types = {"logits": "*bf16", "codes": "*i32", "report": "*i32", "row_stride": "i32"}
    types |= dict.fromkeys(("rows", "drafts"), "*i64")
    types |= dict.fromkeys(("penalties", "stop_bias", "think_end_bias", "totals"), "*fp32")
    return (
        GateCase(
            name="drafts",
            fn=drafts_kernel,
            signature=types,
            constexprs={"V": 248320, "WORDS": WORDS},
            num_warps=WARPS,
            num_stages=1,
        ),
    )
