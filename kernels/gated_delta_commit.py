"""S = exp(g) S; S = S + k (beta (v - S^T k))^T; o = S^T q / sqrt(Dk): row by row, per value head.

`recurrent` is the definition, a loop over rows. `chunked` computes the same for a chunk of rows at
once (the WY form of Yang et al., "Gated Delta Networks", 2024, section 3.3). Both are float32 and
make a new state; the one they were given stays as it was.

T rows; q and k [T, H_k, Dk] with unit length, v [T, H_v, Dv], g and beta [T, H_v], S [H_v, Dk, Dv].
A key head serves H_v / H_k consecutive value heads.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def causal_conv(qkv: Tensor, conv_state: Tensor, *, taps: Tensor) -> tuple[Tensor, Tensor]:
    """y[t] = silu(sum_j in[t + j] * taps[j]) with in = [conv_state | qkv].

    Args:
        qkv: [T, C].
        conv_state: [J - 1, C] float32, the rows before.
        taps: [J, C] float32; the last one multiplies the row itself.

    Returns:
        y [T, C] float32 and the new conv state, the last J - 1 rows of `in`.
    """
    rows = torch.cat([conv_state, qkv.float()])
    y = rows[: len(qkv)] * taps[0]
    for j in range(1, len(taps)):
        y.addcmul_(rows[j : j + len(qkv)], taps[j])
    return F.silu(y), rows[len(qkv) :].clone()


def gated_delta_recurrent(
    q: Tensor, k: Tensor, *, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """The definition. Returns o [T, H_v, Dv] and the state after the last row."""
    repeats = v.shape[1] // k.shape[1]
    q, k = (x.repeat_interleave(repeats, dim=1) for x in (q * q.shape[-1] ** -0.5, k))
    decay = g.exp()
    outputs = []
    for t in range(len(q)):
        state = state * decay[t, :, None, None]
        seen = torch.bmm(k[t, :, None], state)  # [H_v, 1, Dv]
        change = beta[t, :, None, None] * (v[t, :, None] - seen)
        state.baddbmm_(k[t, :, :, None], change)
        outputs.append(torch.bmm(q[t, :, None], state)[:, 0])
    return torch.stack(outputs), state


def gated_delta_chunked(
    q: Tensor,
    k: Tensor,
    *,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    chunk_size: int = 64,
) -> tuple[Tensor, Tensor]:
    """As `gated_delta_recurrent`, to rounding; loops over chunks of rows, not over rows."""
    rows, dk = len(q), q.shape[-1]
    repeats = v.shape[1] // k.shape[1]
    # Rows of zeros fill the last chunk: g = 0 and beta = 0 leave the state as it is.
    pad = -rows % chunk_size
    q, k, v = (_chunks(F.pad(x, (0, 0, 0, 0, 0, pad)), chunk_size) for x in (q, k, v))
    g, beta = (_chunks(F.pad(x, (0, 0, 0, pad))[..., None], chunk_size) for x in (g, beta))
    q, k = (x.repeat_interleave(repeats, dim=1) for x in (q * dk**-0.5, k))  # [n, H_v, C, Dk]
    between = _decay_between(g[..., 0])  # [n, H_v, C, C]
    since_start = g.cumsum(2).exp()  # [n, H_v, C, 1]
    until_end = between[..., -1, :, None]  # [n, H_v, C, 1]

    # (I + A) [u | w] = [beta v | beta k decay]: u are the changes of an empty state, w what a state
    # adds to them. Forward substitution, not powers of A: those explode when a key repeats.
    k_beta = k * beta
    a = (k_beta @ k.mT * between).tril(-1)
    right = torch.cat([v * beta, k_beta * since_start], dim=-1)
    solved = torch.linalg.solve_triangular(a, right, upper=False, unitriangular=True)
    u, w = solved.split([v.shape[-1], dk], dim=-1)

    within = q @ k.mT * between  # [n, H_v, C, C]
    q_start = q * since_start
    k_end = (k * until_end).mT
    end = since_start[:, :, -1:]  # [n, H_v, 1, 1]
    outputs = []
    for chunk in range(len(q)):
        change = u[chunk] - w[chunk] @ state
        outputs.append(q_start[chunk] @ state + within[chunk] @ change)
        state = state * end[chunk] + k_end[chunk] @ change
    return torch.cat(outputs, dim=1).transpose(0, 1)[:rows], state


def _chunks(x: Tensor, size: int) -> Tensor:
    """[T, H, D] to [T / size, H, size, D]."""
    return x.view(-1, size, *x.shape[1:]).transpose(1, 2)


def _decay_between(g: Tensor) -> Tensor:
    """exp(g[j + 1] + ... + g[i]) for j <= i, else 0: [..., C] to [..., C (i), C (j)].

    Summed per pair: the difference of two running sums would lose digits behind a row with a large
    -g.
    """
    size = g.shape[-1]
    steps = g[..., :, None].expand(*g.shape, size).tril(-1)  # [i, j] = g[i] for i > j
    return steps.cumsum(-2).exp().tril()
