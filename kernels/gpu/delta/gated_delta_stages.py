"""The stages of the chunked gated delta rule; `gated_delta_chunked.py` says what they compute.

The prepare and output stages are the same work for every chunk, so all chunks do them at once; only
the state stage goes from chunk to chunk. One kernel for all would need more registers than there
are. T rows in chunks of C; shapes as in `gated_delta_commit`.
"""

import triton
import triton.language as tl


@triton.jit
def _sums_between(steps, i):
    # [i, j] = g[j + 1] + ... + g[i] for j < i, else 0. Summed per pair: the difference of two
    # running sums would lose digits behind a row with a large -g.
    return tl.cumsum(tl.where(i[:, None] > i[None, :], steps[:, None], 0.0), axis=0)


@triton.jit
def _piece(x, row, stride, inside, start, STEP: tl.constexpr, D: tl.constexpr):
    # Columns start to start + STEP of rows of D.
    d = start + tl.arange(0, STEP)
    here = inside[:, None] & (d < D)[None, :]
    return tl.load(x + row[:, None] * stride + d[None, :], mask=here, other=0.0)


@triton.jit(do_not_specialize=["rows"])
def prepare_kernel(
    k,
    v,
    g,
    beta,
    u,
    w,
    since_start,
    until_end,
    rows,
    k_stride,
    v_stride,
    H_V: tl.constexpr,
    REPEATS: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    C: tl.constexpr,
    STEP: tl.constexpr,
):
    """Program (chunk, head): (I + A) [u | w] = [beta v | beta k decay], A = tril(beta k k^T decay).

    u are the changes that the chunk's rows make to an empty state, w what a state adds to them.
    """
    chunk = tl.program_id(0)
    head = tl.program_id(1)
    i = tl.arange(0, C)
    row = (chunk * C + i).to(tl.int64)
    inside = row < rows
    steps = tl.load(g + row * H_V + head, mask=inside, other=0.0)
    rate = tl.load(beta + row * H_V + head, mask=inside, other=0.0)
    sums = _sums_between(steps, i)
    start_decay = tl.exp(tl.cumsum(steps, axis=0))
    last = tl.sum(tl.where((i == C - 1)[:, None], sums, 0.0), axis=0)
    tl.store(since_start + row * H_V + head, start_decay, mask=inside)
    tl.store(until_end + row * H_V + head, tl.exp(last), mask=inside)
    k += head // REPEATS * DK
    v += head * DV

    a = tl.zeros([C, C], dtype=tl.float32)
    for start in range(0, DK, STEP):
        x = _piece(k, row, k_stride, inside, start, STEP, DK)
        a = tl.dot(x, tl.trans(x), a, input_precision="tf32x3")
    a = tl.where(i[:, None] > i[None, :], a * tl.exp(sums) * rate[:, None], 0.0)

    # The inverse of I + A, row by row: forward substitution, not powers of A, which explode when a
    # key repeats.
    inverse = tl.where(i[:, None] == i[None, :], 1.0, 0.0)
    for r in range(1, C):
        of_row = tl.sum(tl.where(i[:, None] == r, a, 0.0), axis=0)  # [C], zero from r on
        solved = tl.sum(of_row[:, None] * inverse, axis=0)
        inverse = tl.where(i[:, None] == r, inverse - solved[None, :], inverse)

    for start in range(0, DV, STEP):
        d = start + tl.arange(0, STEP)
        here = inside[:, None] & (d < DV)[None, :]
        x = _piece(v, row, v_stride, inside, start, STEP, DV)
        x = tl.dot(inverse, x * rate[:, None], input_precision="tf32x3")
        tl.store(u + (row[:, None] * H_V + head) * DV + d[None, :], x, mask=here)
    for start in range(0, DK, STEP):
        d = start + tl.arange(0, STEP)
        here = inside[:, None] & (d < DK)[None, :]
        x = _piece(k, row, k_stride, inside, start, STEP, DK)
        x = tl.dot(inverse, x * (rate * start_decay)[:, None], input_precision="tf32x3")
        tl.store(w + (row[:, None] * H_V + head) * DK + d[None, :], x, mask=here)


@triton.jit(do_not_specialize=["rows"])
def state_kernel(
    k,
    u,
    w,
    since_start,
    until_end,
    state,
    starts,
    new_state,
    rows,
    k_stride,
    H_V: tl.constexpr,
    REPEATS: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    C: tl.constexpr,
    STEP: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Program (head, columns): BLOCK_V columns of one head's S from chunk to chunk.

    Turns u into the changes that the rows make to the real state, and keeps S as it is at the start
    of each chunk. S lies in four pieces of STEP rows: one product with all of S at a time would
    need more registers than there are.
    """
    head = tl.program_id(0)
    column = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    is_column = (column < DV)[None, :]
    i = tl.arange(0, C)
    d = tl.arange(0, STEP)
    here = (head * DK + d)[:, None] * DV + column[None, :]
    in_0 = (d < DK)[:, None] & is_column
    in_1 = (d + STEP < DK)[:, None] & is_column
    in_2 = (d + 2 * STEP < DK)[:, None] & is_column
    in_3 = (d + 3 * STEP < DK)[:, None] & is_column
    s_0 = tl.load(state + here, mask=in_0, other=0.0)
    s_1 = tl.load(state + here + STEP * DV, mask=in_1, other=0.0)
    s_2 = tl.load(state + here + 2 * STEP * DV, mask=in_2, other=0.0)
    s_3 = tl.load(state + here + 3 * STEP * DV, mask=in_3, other=0.0)
    k += head // REPEATS * DK
    w += head * DK

    for chunk in range(0, tl.cdiv(rows, C)):
        kept = starts + tl.cast(chunk, tl.int64) * (H_V * DK * DV) + here
        tl.store(kept, s_0, mask=in_0)
        tl.store(kept + STEP * DV, s_1, mask=in_1)
        tl.store(kept + 2 * STEP * DV, s_2, mask=in_2)
        tl.store(kept + 3 * STEP * DV, s_3, mask=in_3)

        row = (chunk * C + i).to(tl.int64)
        inside = row < rows
        x = _piece(w, row, H_V * DK, inside, 0, STEP, DK)
        known = tl.dot(x, s_0, input_precision="tf32x3")
        x = _piece(w, row, H_V * DK, inside, STEP, STEP, DK)
        known = tl.dot(x, s_1, known, input_precision="tf32x3")
        x = _piece(w, row, H_V * DK, inside, 2 * STEP, STEP, DK)
        known = tl.dot(x, s_2, known, input_precision="tf32x3")
        x = _piece(w, row, H_V * DK, inside, 3 * STEP, STEP, DK)
        known = tl.dot(x, s_3, known, input_precision="tf32x3")
        at = (row[:, None] * H_V + head) * DV + column[None, :]
        change = tl.load(u + at, mask=inside[:, None] & is_column, other=0.0) - known
        tl.store(u + at, change, mask=inside[:, None] & is_column)

        final = tl.minimum((chunk + 1) * C, rows) - 1
        end = tl.load(since_start + tl.cast(final, tl.int64) * H_V + head)
        change *= tl.load(until_end + row * H_V + head, mask=inside, other=0.0)[:, None]
        x = _piece(k, row, k_stride, inside, 0, STEP, DK)
        s_0 = tl.dot(tl.trans(x), change, s_0 * end, input_precision="tf32x3")
        x = _piece(k, row, k_stride, inside, STEP, STEP, DK)
        s_1 = tl.dot(tl.trans(x), change, s_1 * end, input_precision="tf32x3")
        x = _piece(k, row, k_stride, inside, 2 * STEP, STEP, DK)
        s_2 = tl.dot(tl.trans(x), change, s_2 * end, input_precision="tf32x3")
        x = _piece(k, row, k_stride, inside, 3 * STEP, STEP, DK)
        s_3 = tl.dot(tl.trans(x), change, s_3 * end, input_precision="tf32x3")
    tl.store(new_state + here, s_0, mask=in_0)
    tl.store(new_state + here + STEP * DV, s_1, mask=in_1)
    tl.store(new_state + here + 2 * STEP * DV, s_2, mask=in_2)
    tl.store(new_state + here + 3 * STEP * DV, s_3, mask=in_3)


@triton.jit(do_not_specialize=["rows"])
def output_kernel(
    q,
    k,
    g,
    change,
    since_start,
    starts,
    out,
    rows,
    q_stride,
    k_stride,
    scale,
    H_V: tl.constexpr,
    REPEATS: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    C: tl.constexpr,
    STEP: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Program (chunk, head, columns): o = (q decay) S + tril(q k^T decay) change, over sqrt(Dk)."""
    chunk = tl.program_id(0)
    head = tl.program_id(1)
    column = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    is_column = (column < DV)[None, :]
    i = tl.arange(0, C)
    row = (chunk * C + i).to(tl.int64)
    inside = row < rows
    q += head // REPEATS * DK
    k += head // REPEATS * DK
    starts += (tl.cast(chunk, tl.int64) * H_V + head) * (DK * DV)

    o = tl.zeros([C, BLOCK_V], dtype=tl.float32)
    within = tl.zeros([C, C], dtype=tl.float32)
    for start in range(0, DK, STEP):
        d = start + tl.arange(0, STEP)
        x = _piece(q, row, q_stride, inside, start, STEP, DK)
        y = _piece(k, row, k_stride, inside, start, STEP, DK)
        within = tl.dot(x, tl.trans(y), within, input_precision="tf32x3")
        s = tl.load(
            starts + d[:, None] * DV + column[None, :],
            mask=(d < DK)[:, None] & is_column,
            other=0.0,
        )
        o = tl.dot(x, s, o, input_precision="tf32x3")
    decay = tl.load(since_start + row * H_V + head, mask=inside, other=0.0)
    steps = tl.load(g + row * H_V + head, mask=inside, other=0.0)
    decay_between = tl.exp(_sums_between(steps, i))
    within = tl.where(i[:, None] >= i[None, :], within * decay_between, 0.0)
    at = (row[:, None] * H_V + head) * DV + column[None, :]
    x = tl.load(change + at, mask=inside[:, None] & is_column, other=0.0)
    o = tl.dot(within, x, o * decay[:, None], input_precision="tf32x3")
    tl.store(out + at, o * scale, mask=inside[:, None] & is_column)
