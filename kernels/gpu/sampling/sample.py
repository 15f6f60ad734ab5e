"""token = argmax of the controlled logits, or a draw; and what a row's distribution says about it.

controlled = bans, penalties and biases of `ControlTensors` over the logits; then per row the
token's probability, before and after the controls, the entropy, and the five most probable tokens.
Defined by `pick` (clover_local/decoding/pick.py). Only [rows] and [rows, 5] numbers leave the
device, and no float32 copy of the logits is made: they are read once (and again by a draw).

A program has one row and BLOCK_V columns; a second launch joins its row's programs.
A row with NaN, +inf or nothing but bans gets a confidence of NaN: the caller refuses it.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from clover_local.kernels.gpu.check import check_float
from clover_local.kernels.gpu.gate import GateCase
from clover_local.kernels.gpu.sampling.controls import (
    ControlTensors,
    check_controls,
    control_codes,
    controlled_logits,
)

TOP = 5
_PLACES = tl.constexpr(8)  # of which TOP are used: powers of two only


@dataclass(frozen=True)
class SampleConfig:
    """Columns a program and its warps."""

    block_v: int
    num_warps: int


# 248,320 columns are 61 programs a row, so even one row has most of 70 multiprocessors at work. A
# thread has 8 columns, so that the five maxima work in registers: with 16 it takes all and spills.
CONFIG = SampleConfig(block_v=4096, num_warps=16)


@dataclass(frozen=True, eq=False)
class SampledRows:
    """As `RowStatistics` (clover_local/decoding/pick.py). Ids of probability 0 may repeat."""

    token: Tensor  # [rows] int64
    confidence: Tensor  # [rows] float32
    raw_confidence: Tensor  # [rows]
    entropy: Tensor  # [rows]
    top_ids: Tensor  # [rows, 5] int64, a lower id first among equals
    top_probabilities: Tensor  # [rows, 5]


@dataclass(frozen=True, eq=False)
class Summary:
    """What the softmax of each row needs, for a draw."""

    codes: Tensor  # [V + splits] int32
    maxima: Tensor  # [rows, splits] float32, of the controlled logits
    totals: Tensor  # [rows, 4] float32: max and sum of exp, controlled; the same of raw logits


@triton.jit
def _exponentials(x):
    """The largest x, and exp(x - it); where nothing is above -inf, zeros."""
    top = tl.max(x, axis=0)
    return top, tl.exp(x - tl.where(top == float("-inf"), 0.0, top))


@triton.jit(do_not_specialize=["splits"])
def split_kernel(
    logits,
    rows,
    codes,
    penalties,
    stop_bias,
    think_end_bias,
    parts,
    maxima,
    top_values,
    top_columns,
    row_stride,
    splits,
    V: tl.constexpr,
    TOP: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """One row's columns of one split: sums of exponentials, and the largest TOP."""
    row = tl.program_id(1)
    split = tl.program_id(0)
    source = tl.load(rows + row).to(tl.int64)
    column = split * BLOCK_V + tl.arange(0, BLOCK_V)
    inside = column < V
    x = tl.load(logits + source * row_stride + column, mask=inside, other=float("-inf"))
    raw = x.to(tl.float32)
    x = raw
    if tl.load(codes + V + split) != 0:
        code = tl.load(codes + column, mask=inside, other=0)
        raw = tl.where((code & 1) != 0, float("-inf"), raw)
        x = controlled_logits(
            raw, code, penalties, tl.load(stop_bias + row), tl.load(think_end_bias + row)
        )
    raw_top, raw_shares = _exponentials(raw)
    top, shares = _exponentials(x)
    part = row.to(tl.int64) * splits + split
    tl.store(maxima + part, top)
    tl.store(parts + part * 4, tl.sum(shares, axis=0))
    surprise = tl.where(shares > 0, shares * (x - top), 0.0)
    tl.store(parts + part * 4 + 1, tl.sum(surprise, axis=0))
    tl.store(parts + part * 4 + 2, raw_top)
    tl.store(parts + part * 4 + 3, tl.sum(raw_shares, axis=0))
    place = tl.arange(0, _PLACES)
    values = tl.full([_PLACES], float("-inf"), tl.float32)
    columns = tl.zeros([_PLACES], tl.int32)
    for k in range(TOP):
        largest = tl.max(x, axis=0)
        # Where all is NaN no column is the largest; the last one stands in for it.
        winner = tl.min(tl.where(x == largest, column, V - 1), axis=0)
        values = tl.where(place == k, largest, values)
        columns = tl.where(place == k, winner, columns)
        x = tl.where(column == winner, float("-inf"), x)
    tl.store(top_values + part * _PLACES + place, values, mask=place < _PLACES)
    tl.store(top_columns + part * _PLACES + place, columns, mask=place < _PLACES)


@triton.jit(do_not_specialize=["splits"])
def join_kernel(
    logits,
    rows,
    parts,
    maxima,
    top_values,
    top_columns,
    totals,
    token,
    confidence,
    raw_confidence,
    entropy,
    top_ids,
    top_probabilities,
    row_stride,
    splits,
    TOP: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """One row: what its splits say together, and its most probable token."""
    row = tl.program_id(0).to(tl.int64)
    s = tl.arange(0, BLOCK_S)
    inside = s < splits
    part = parts + (row * splits + s) * 4
    tops = tl.load(maxima + row * splits + s, mask=inside, other=float("-inf"))
    sums = tl.load(part, mask=inside, other=0.0)
    surprises = tl.load(part + 1, mask=inside, other=0.0)
    raw_tops = tl.load(part + 2, mask=inside, other=float("-inf"))
    raw_sums = tl.load(part + 3, mask=inside, other=0.0)
    top, shares = _exponentials(tops)
    total = tl.sum(shares * sums, axis=0)
    surprise = tl.where(shares > 0, shares * (surprises + sums * (tops - top)), 0.0)
    raw_top, raw_shares = _exponentials(raw_tops)
    raw_total = tl.sum(raw_shares * raw_sums, axis=0)
    tl.store(entropy + row, tl.log(total) - tl.sum(surprise, axis=0) / total)
    tl.store(totals + row * 4, top)
    tl.store(totals + row * 4 + 1, total)
    tl.store(totals + row * 4 + 2, raw_top)
    tl.store(totals + row * 4 + 3, raw_total)

    i = tl.arange(0, BLOCK_S * _PLACES)
    there = i < splits * _PLACES
    at = row * splits * _PLACES + i
    values = tl.load(top_values + at, mask=there, other=float("-inf"))
    columns = tl.load(top_columns + at, mask=there, other=0)
    for k in range(TOP):
        largest = tl.max(values, axis=0)
        # Splits, and places of one split, go by rising column among equals.
        winner = tl.min(tl.where(values == largest, i, splits * _PLACES - 1), axis=0)
        column = tl.max(tl.where(i == winner, columns, 0), axis=0)
        probability = tl.exp(largest - top) / total
        tl.store(top_ids + row * TOP + k, column.to(tl.int64))
        tl.store(top_probabilities + row * TOP + k, probability)
        if k == 0:
            tl.store(token + row, column.to(tl.int64))
            tl.store(confidence + row, probability)
            source = tl.load(rows + row).to(tl.int64)
            raw = tl.load(logits + source * row_stride + column).to(tl.float32)
            tl.store(raw_confidence + row, tl.exp(raw - raw_top) / raw_total)
        values = tl.where(i == winner, float("-inf"), values)


def sample(
    logits: Tensor, controls: ControlTensors, *, rows: Tensor, config: SampleConfig = CONFIG
) -> tuple[SampledRows, Summary]:
    """The most probable token of every row of `rows`, a lower id first among equals.

    Args:
        logits: [B, V], last stride 1; left as they are.
        controls: built for `rows`.
        rows: [rows] int64, each below B.
        config: how many columns a program has.

    Returns:
        The rows' numbers, and what `draw.draw` takes to replace their tokens by drawn ones.

    Raises:
        ValueError: shapes, dtypes, strides or devices that do not fit.
    """
    _check(logits, controls, rows=rows)
    (_, vocabulary), device = logits.shape, logits.device
    count, splits = len(rows), triton.cdiv(vocabulary, config.block_v)
    top = min(TOP, vocabulary)
    codes = control_codes(controls, vocabulary=vocabulary, block_v=config.block_v, device=device)
    float32: dict[str, Any] = {"dtype": torch.float32, "device": device}
    parts = torch.empty(count, splits, 4, **float32)
    maxima = torch.empty(count, splits, **float32)
    top_values = torch.empty(count, splits, _PLACES.value, **float32)
    top_columns = torch.empty_like(top_values, dtype=torch.int32)
    totals = torch.empty(count, 4, **float32)
    out = SampledRows(
        torch.empty(count, dtype=torch.int64, device=device),
        torch.empty(count, **float32),
        torch.empty(count, **float32),
        torch.empty(count, **float32),
        torch.empty(count, top, dtype=torch.int64, device=device),
        torch.empty(count, top, **float32),
    )
    split_kernel[(splits, count)](
        logits=logits,
        rows=rows,
        codes=codes,
        penalties=controls.penalties,
        stop_bias=controls.stop_bias,
        think_end_bias=controls.think_end_bias,
        parts=parts,
        maxima=maxima,
        top_values=top_values,
        top_columns=top_columns,
        row_stride=logits.stride(0),
        splits=splits,
        V=vocabulary,
        TOP=top,
        BLOCK_V=config.block_v,
        num_warps=config.num_warps,
    )
    join_kernel[(count,)](
        logits=logits,
        rows=rows,
        parts=parts,
        maxima=maxima,
        top_values=top_values,
        top_columns=top_columns,
        totals=totals,
        token=out.token,
        confidence=out.confidence,
        raw_confidence=out.raw_confidence,
        entropy=out.entropy,
        top_ids=out.top_ids,
        top_probabilities=out.top_probabilities,
        row_stride=logits.stride(0),
        splits=splits,
        TOP=top,
        BLOCK_S=triton.next_power_of_2(splits),
        num_warps=4,
    )
    return out, Summary(codes, maxima, totals)


def _check(logits: Tensor, controls: ControlTensors, *, rows: Tensor) -> None:
    if logits.dim() != 2 or 0 in logits.shape:
        raise ValueError(f"logits are {list(logits.shape)}, not [B, V]")
    check_float("logits", logits)
    if logits.stride(1) != 1 and logits.shape[1] > 1:
        raise ValueError(f"logits have a last stride of {logits.stride(1)}, not 1")
    if rows.dim() != 1 or len(rows) == 0:
        raise ValueError(f"rows are {list(rows.shape)}, not [rows], at least one")
    if rows.dtype != torch.int64 or not rows.is_contiguous():
        raise ValueError(
            f"rows are {rows.dtype} with a stride of {rows.stride(0)}, not int64 and 1"
        )
    if rows.device != logits.device:
        raise ValueError(f"rows are on {rows.device}, the logits on {logits.device}")
    check_controls(controls, rows=len(rows), device=logits.device)


def gate_cases() -> tuple[GateCase, ...]:
    """The real model's vocabulary."""
    vocabulary = 248320
    splits = triton.cdiv(vocabulary, CONFIG.block_v)
    types = {"logits": "*bf16", "codes": "*i32", "top_columns": "*i32"}
    types |= {"rows": "*i64", "token": "*i64", "top_ids": "*i64", "row_stride": "i32"}
    floats = ("penalties", "stop_bias", "think_end_bias", "parts", "maxima", "top_values", "totals")
    results = ("confidence", "raw_confidence", "entropy", "top_probabilities")
    types |= {**dict.fromkeys((*floats, *results), "*fp32"), "splits": "i32"}
    cases: tuple[tuple[str, Any, dict[str, int], int], ...] = (
        (
            "split",
            split_kernel,
            {"V": vocabulary, "BLOCK_V": CONFIG.block_v, "TOP": TOP},
            CONFIG.num_warps,
        ),
        ("join", join_kernel, {"TOP": TOP, "BLOCK_S": triton.next_power_of_2(splits)}, 4),
    )
    return tuple(
        GateCase(
            name=f"sample: {name}",
            fn=fn,
            signature={arg: types[arg] for arg in fn.arg_names if arg in types},
            constexprs=constants,
            num_warps=warps,
            num_stages=1,
        )
        for name, fn, constants, warps in cases
    )
