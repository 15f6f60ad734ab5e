"""token: where the falling probabilities of softmax(logits / temperature) pass a random number.

Cut by top-k, then by top-p. Defined by `draw` (clover_local/decoding/draw.py) and `uniform`
(clover_local/decoding/random.py).

Nothing is sorted. A token's distance (max - logit) / temperature is never negative, so the bits of
a float32 distance are an integer of the same order, and the place of the k-th token, of the end of
the nucleus and of the draw are each found by bisecting that integer. Every step reads the row once,
from the second-level cache, and only those splits whose nearest token is near enough: one of 61 for
a sure model. A step also moves its borders to the next distances that occur: 16-bit logits have few
different ones, so that about a dozen steps do. Among tokens at one distance the lower id is first.

Masses are float32; a draw can differ from the plain operator's only where the random number falls
within that rounding of a border.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from clover_local.kernels.gpu.gate import GateCase
from clover_local.kernels.gpu.sampling.controls import ControlTensors, controlled_logits
from clover_local.kernels.gpu.sampling.sample import CONFIG as SAMPLE_CONFIG
from clover_local.kernels.gpu.sampling.sample import SampleConfig, SampledRows, Summary

# One program has a row: 8 columns a thread, four sums of each.
CONFIG = SampleConfig(block_v=SAMPLE_CONFIG.block_v, num_warps=16)

# The bits of 104.0: what is farther has a float32 probability of 0.
_FARTHEST = tl.constexpr(0x42D00000)
_NO_COLUMN = tl.constexpr(0x7FFFFFFF)


@dataclass(frozen=True, eq=False)
class DrawTensors:
    """The settings of a draw on the device, so that a CUDA graph can be replayed with others."""

    temperature: Tensor  # [1] float32, above 0
    top_k: Tensor  # [1] int32; 0 keeps every token
    top_p: Tensor  # [1] float64; 1 keeps every token
    seed: Tensor  # [1] int64, the bits of the unsigned seed
    pass_number: Tensor  # [1] int32
    positions: Tensor  # [rows] int64: each row's 1-based position in the response


@triton.jit
def _times(amount, each):
    """The whole number of times that `each` fits into `amount`, both float64 and not negative."""
    # A float64 division would be a call with a stack of its own.
    n = tl.floor(amount.to(tl.float32) / each.to(tl.float32)).to(tl.float64)
    n = tl.where(n * each > amount, n - 1, n)
    return tl.where((n + 1) * each <= amount, n + 1, n)


@triton.jit
def _load_distances(
    logits,
    codes,
    penalties,
    stop,
    think_end,
    split,
    top,
    temperature,
    V: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Bits of the distances of a split's columns; `logits` of this row."""
    column = split * BLOCK_V + tl.arange(0, BLOCK_V)
    x = tl.load(logits + column, mask=column < V, other=float("-inf")).to(tl.float32)
    if tl.load(codes + V + split) != 0:
        code = tl.load(codes + column, mask=column < V, other=0)
        x = controlled_logits(x, code, penalties, stop, think_end)
    return (tl.maximum(top - x, 0.0) / temperature).to(tl.int32, bitcast=True)


@triton.jit
def _nearest(maxima, split, top, temperature):
    """Bits that no distance of the split is below."""
    nearest = tl.maximum(top - tl.load(maxima + split), 0.0) / temperature
    # Less a few: another kernel made the maximum, perhaps rounding once where this one does twice.
    return nearest.to(tl.int32, bitcast=True) - 4


@triton.jit
def _share(distance):
    """exp(-distance), of its bits."""
    return tl.exp(-distance.to(tl.float32, bitcast=True))


@triton.jit
def _up_to(
    logits,
    codes,
    penalties,
    stop,
    think_end,
    maxima,
    splits,
    top,
    temperature,
    border,
    V: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Tokens no farther than `border`: mass, number, the farthest; and the nearest of the rest."""
    mass = tl.zeros([BLOCK_V], tl.float32)
    count = tl.zeros([BLOCK_V], tl.int32)
    farthest = tl.zeros([BLOCK_V], tl.int32)
    rest = tl.full([BLOCK_V], _NO_COLUMN, tl.int32)
    left_out = tl.full([], _NO_COLUMN, tl.int32)
    for split in range(splits):
        nearest = _nearest(maxima, split, top, temperature)
        if nearest <= border:
            distance = _load_distances(
                logits, codes, penalties, stop, think_end, split, top, temperature, V, BLOCK_V
            )
            near = distance <= border
            mass += tl.where(near, _share(distance), 0.0)
            count += near.to(tl.int32)
            farthest = tl.maximum(farthest, tl.where(near, distance, 0))
            rest = tl.minimum(rest, tl.where(near, _NO_COLUMN, distance))
        else:
            left_out = tl.minimum(left_out, nearest)
    return (
        tl.sum(mass, axis=0).to(tl.float64),
        tl.sum(count, axis=0),
        tl.max(farthest, axis=0),
        tl.minimum(tl.min(rest, axis=0), left_out),
    )


@triton.jit(do_not_specialize=["splits"])
def draw_kernel(
    logits,
    rows,
    codes,
    penalties,
    stop_bias,
    think_end_bias,
    maxima,
    totals,
    temperature,
    top_k,
    top_p,
    seed,
    pass_number,
    positions,
    token,
    confidence,
    raw_confidence,
    row_stride,
    splits,
    V: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """One row."""
    row = tl.program_id(0).to(tl.int64)
    logits += tl.load(rows + row).to(tl.int64) * row_stride
    maxima += row * splits
    top = tl.load(totals + row * 4)
    stop = tl.load(stop_bias + row)
    think_end = tl.load(think_end_bias + row)
    warmth = tl.maximum(tl.load(temperature), 1e-30)  # as `draw`: keeps 0 / 0 out
    word, _, _, _ = tl.philox(
        tl.load(seed),
        tl.load(positions + row).to(tl.int32),
        tl.load(pass_number),
        tl.full([], 0, tl.int32),
        tl.full([], 0, tl.int32),
    )
    uniform = (word >> 8).to(tl.float64) * (1.0 / (1 << 24))

    # Kept so far: all tokens up to `edge`, their mass and number.
    kept, tokens, edge, _ = _up_to(
        logits,
        codes,
        penalties,
        stop,
        think_end,
        maxima,
        splits,
        top,
        warmth,
        _FARTHEST,
        V,
        BLOCK_V,
    )
    most = tl.load(top_k)
    nucleus = tl.load(top_p)
    ahead = tl.full([], 0, tl.int32)  # tokens at the edge's distance before the one sought
    # In turn: the distance of the k-th token, of the nucleus' last, and of the one drawn.
    for search in range(3):
        mass = tl.where(search == 1, nucleus, uniform) * kept
        # The drawn token is the first with more than `mass` up to it.
        passed = tl.maximum(mass * 1.0000000000000004, 1e-300)
        wanted = tl.where(search == 0, 0.0, tl.where(search == 1, mass, passed))
        number = tl.where(search == 0, most, 0)
        off = ((search == 0) & ((most <= 0) | (most >= V))) | ((search == 1) & (nucleus >= 1))
        low = tl.where(off, edge, 0)
        before = tl.full([], 0.0, tl.float64)
        here = kept
        earlier = tl.full([], 0, tl.int32)
        until = tokens
        while low < edge:
            border = low + (edge - low) // 2
            sum_here, count_here, farthest, rest = _up_to(
                logits,
                codes,
                penalties,
                stop,
                think_end,
                maxima,
                splits,
                top,
                warmth,
                border,
                V,
                BLOCK_V,
            )
            enough = (sum_here >= wanted) & (count_here >= number)
            edge = tl.where(enough, farthest, edge)
            here = tl.where(enough, sum_here, here)
            until = tl.where(enough, count_here, until)
            low = tl.where(enough, low, tl.minimum(tl.maximum(rest, border + 1), edge))
            before = tl.where(enough, before, sum_here)
            earlier = tl.where(enough, earlier, count_here)
        each = _share(edge).to(tl.float64)
        whole = _times(tl.maximum(mass - before, 0.0), each)
        # The nucleus may end within several tokens at one distance.
        short = before + whole * each < mass
        cut = before + tl.maximum(tl.where(short, whole + 1, whole), 1.0) * each
        kept = tl.where((search == 1) & (nucleus < 1), tl.minimum(cut, here), here)
        tokens = until
        ahead = tl.minimum(whole, (until - earlier - 1).to(tl.float64)).to(tl.int32)
        ahead = tl.maximum(ahead, 0)

    found = tl.full([], _NO_COLUMN, tl.int32)
    for split in range(splits):
        if _nearest(maxima, split, top, warmth) <= edge:
            distance = _load_distances(
                logits, codes, penalties, stop, think_end, split, top, warmth, V, BLOCK_V
            )
            equal = (distance == edge).to(tl.int32)
            column = split * BLOCK_V + tl.arange(0, BLOCK_V)
            mine = (equal == 1) & (tl.cumsum(equal, 0) == ahead + 1)
            found = tl.minimum(found, tl.min(tl.where(mine, column, _NO_COLUMN), axis=0))
            ahead -= tl.sum(equal, axis=0)
    # A row of NaN has no such token; its confidence says so.
    found = tl.minimum(found, V - 1)
    raw = tl.load(logits + found).to(tl.float32)
    x = controlled_logits(raw, tl.load(codes + found), penalties, stop, think_end)
    tl.store(token + row, found.to(tl.int64))
    tl.store(confidence + row, tl.exp(x - top) / tl.load(totals + row * 4 + 1))
    raw_top, raw_total = tl.load(totals + row * 4 + 2), tl.load(totals + row * 4 + 3)
    tl.store(raw_confidence + row, tl.exp(raw - raw_top) / raw_total)


def draw(
    logits: Tensor,
    controls: ControlTensors,
    *,
    rows: Tensor,
    settings: DrawTensors,
    sampled: SampledRows,
    summary: Summary,
    config: SampleConfig = CONFIG,
) -> None:
    """Replaces each row's token in `sampled`, and its confidences, by a drawn one's.

    Args:
        logits: as given to `sample`, like `controls` and `rows`.
        controls: see there.
        rows: see there.
        settings: temperature, cuts, and what the random number is a function of.
        sampled: from `sample`; changed in place.
        summary: likewise from there.
        config: the columns of `sample`'s splits, and warps.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit.
    """
    splits = summary.maxima.shape[1]
    if splits != triton.cdiv(logits.shape[1], config.block_v):
        raise ValueError(f"{splits} splits of {logits.shape[1]} columns by {config.block_v}")
    _check(settings, rows=rows, device=logits.device)
    draw_kernel[(len(rows),)](
        logits=logits,
        rows=rows,
        codes=summary.codes,
        penalties=controls.penalties,
        stop_bias=controls.stop_bias,
        think_end_bias=controls.think_end_bias,
        maxima=summary.maxima,
        totals=summary.totals,
        temperature=settings.temperature,
        top_k=settings.top_k,
        top_p=settings.top_p,
        seed=settings.seed,
        pass_number=settings.pass_number,
        positions=settings.positions,
        token=sampled.token,
        confidence=sampled.confidence,
        raw_confidence=sampled.raw_confidence,
        row_stride=logits.stride(0),
        splits=splits,
        V=logits.shape[1],
        BLOCK_V=config.block_v,
        num_warps=config.num_warps,
    )


def _check(settings: DrawTensors, *, rows: Tensor, device: torch.device) -> None:
    wanted = {
        "temperature": (torch.float32, 1),
        "top_k": (torch.int32, 1),
        "top_p": (torch.float64, 1),
        "seed": (torch.int64, 1),
        "pass_number": (torch.int32, 1),
        "positions": (torch.int64, len(rows)),
    }
    for name, (dtype, length) in wanted.items():
        x: Tensor = getattr(settings, name)
        if x.dtype != dtype or x.shape != (length,) or not x.is_contiguous():
            raise ValueError(f"{name} is {list(x.shape)} {x.dtype}, not [{length}] {dtype}")
        if x.device != device:
            raise ValueError(f"{name} is on {x.device}, the logits on {device}")


def gate_cases() -> tuple[GateCase, ...]:
    """The real model's vocabulary."""
    types = {"logits": "*bf16", "rows": "*i64", "codes": "*i32", "token": "*i64"}
    floats = ("penalties", "stop_bias", "think_end_bias", "maxima", "totals", "temperature")
    types |= dict.fromkeys((*floats, "confidence", "raw_confidence"), "*fp32")
    types |= {"top_k": "*i32", "top_p": "*fp64", "seed": "*i64", "pass_number": "*i32"}
    types |= {"positions": "*i64", "row_stride": "i32", "splits": "i32"}
    return (
        GateCase(
            name="draw",
            fn=draw_kernel,
            signature=types,
            constexprs={"V": 248320, "BLOCK_V": CONFIG.block_v},
            num_warps=CONFIG.num_warps,
            num_stages=1,
        ),
    )
