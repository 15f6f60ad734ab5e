"""S = exp(g) S; S = S + k (beta (v - S^T k))^T; o = S^T q / sqrt(Dk): row by row, per value head.

`recurrent` is the definition, a loop over rows. `chunked` computes the same for a chunk of rows at
once (the WY form of Yang et al., "Gated Delta Networks", 2024, section 3.3). Both are float32 and
make a new state; the one they were given stays as it was. `mix_commit` is all that a GDN layer does
between its two projections: convolution, delta rule, gated norm. `mix_verify` does the same over
rows that may not count and makes no state, but a record, from which `replay` makes the state after
the first of them. States and records of several layers can lie in one tensor of each kind, so that
`replay_layers` replays all of them at once.

T rows; q and k [T, H_k, Dk] with unit length, v [T, H_v, Dv], g and beta [T, H_v], S [H_v, Dk, Dv].
A key head serves H_v / H_k consecutive value heads.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from clover_local.kernels.norms import gated_rms_norm, l2_norm

RECURRENT_ROWS = 4
"""Up to here a loop over rows is cheaper than one chunk."""


@dataclass(frozen=True)
class HeadShape:
    """How the channels divide into heads."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int

    @property
    def channels(self) -> int:
        """C."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    def keys_of(self, mixed: Tensor) -> Tensor:
        """Of q | k | v [..., C] the view k [..., H_k, Dk]."""
        keys = self.key_heads * self.key_dim
        k = mixed[..., keys : 2 * keys]
        return k.view(*mixed.shape[:-1], self.key_heads, self.key_dim)

    def values_of(self, mixed: Tensor) -> Tensor:
        """Of q | k | v [..., C] the view v [..., H_v, Dv]."""
        keys = self.key_heads * self.key_dim
        v = mixed[..., 2 * keys :]
        return v.view(*mixed.shape[:-1], self.value_heads, self.value_dim)


@dataclass(frozen=True, eq=False)
class MixerWeights:
    """What a GDN layer has besides its two projections; tensors are float32."""

    heads: HeadShape
    taps: Tensor  # [J, C]
    rate: Tensor  # [H_v], -exp(A_log)
    dt_bias: Tensor  # [H_v]
    norm: Tensor  # [Dv]
    eps: float


@dataclass(frozen=True, eq=False)
class ProjectedRows:
    """The parts of the first projection, views of one tensor or not."""

    qkv: Tensor  # [T, C]
    z: Tensor  # [T, H_v, Dv]
    a: Tensor  # [T, H_v]
    b: Tensor  # [T, H_v]


@dataclass(frozen=True, eq=False)
class DeltaState:
    """What a GDN layer remembers of the rows before."""

    recurrent: Tensor  # [H_v, Dk, Dv] float32
    conv: Tensor  # [J - 1, C] float32: the last inputs of the convolution


@dataclass(frozen=True, eq=False)
class DeltaRecord:
    """What a GDN layer keeps of rows that may not count: a state per row would be much larger."""

    heads: HeadShape
    inputs: Tensor  # [T, C] any float: of the convolution
    mixed: Tensor  # [T, C] float32: behind it, q | k | v, of which a replay reads k and v
    g: Tensor  # [T, H_v]
    beta: Tensor  # [T, H_v]

    @property
    def k(self) -> Tensor:
        """[T, H_k, Dk], unit length."""
        return self.heads.keys_of(self.mixed)

    @property
    def v(self) -> Tensor:
        """[T, H_v, Dv]."""
        return self.heads.values_of(self.mixed)

    def copy_(self, other: "DeltaRecord") -> None:
        """Takes the numbers of a record of as many rows."""
        self.inputs.copy_(other.inputs)
        self.mixed.copy_(other.mixed)
        self.g.copy_(other.g)
        self.beta.copy_(other.beta)


@dataclass(frozen=True, eq=False)
class LayeredStates:
    """`DeltaState` of L layers."""

    recurrent: Tensor  # [L, H_v, Dk, Dv]
    conv: Tensor  # [L, J - 1, C]

    @classmethod
    def empty(
        cls, layers: int, heads: HeadShape, *, kept: int, device: torch.device
    ) -> "LayeredStates":
        """Room for them; `kept` inputs of the convolution."""
        shape = (layers, heads.value_heads, heads.key_dim, heads.value_dim)
        return cls(
            torch.empty(shape, device=device),
            torch.empty(layers, kept, heads.channels, device=device),
        )

    @property
    def layers(self) -> tuple[DeltaState, ...]:
        """Views of each layer's own."""
        return tuple(map(DeltaState, self.recurrent, self.conv))


@dataclass(frozen=True, eq=False)
class LayeredRecord:
    """`DeltaRecord` of L layers; rows of a layer may be followed by some that mean nothing."""

    heads: HeadShape
    inputs: Tensor  # [L, T, C]
    mixed: Tensor  # [L, T, C]
    g: Tensor  # [L, T, H_v]
    beta: Tensor  # [L, T, H_v]

    @classmethod
    def empty(
        cls, layers: int, rows: int, *, heads: HeadShape, dtype: torch.dtype, device: torch.device
    ) -> "LayeredRecord":
        """Room for `rows` rows, whose inputs are `dtype`."""
        inputs = torch.empty(layers, rows, heads.channels, dtype=dtype, device=device)
        g = torch.empty(layers, rows, heads.value_heads, device=device)
        mixed = torch.empty_like(inputs, dtype=torch.float32)
        return cls(heads, inputs, mixed, g, torch.empty_like(g))

    def first(self, rows: int) -> "LayeredRecord":
        """Views of the first rows of each layer."""
        parts = (x[:, :rows] for x in (self.inputs, self.mixed, self.g, self.beta))
        return LayeredRecord(self.heads, *parts)

    @property
    def layers(self) -> tuple[DeltaRecord, ...]:
        """Views of each layer's own."""
        return tuple(
            DeltaRecord(self.heads, *parts)
            for parts in zip(self.inputs, self.mixed, self.g, self.beta, strict=True)
        )


def mix_commit(
    rows: ProjectedRows,
    weights: MixerWeights,
    *,
    before: DeltaState,
    into: DeltaState | None = None,
) -> tuple[Tensor, DeltaState]:
    """Convolution, delta rule and gated norm of new rows.

    Args:
        rows: of this pass.
        weights: the layer's.
        before: the state to start from; stays as it is.
        into: where the new state goes; new tensors without it.

    Returns:
        [T, H_v, Dv] of the dtype of z, and the state after all rows.
    """
    y, conv = causal_conv(rows.qkv, before.conv, taps=weights.taps)
    q, k, v = split_heads(y, weights.heads)
    out, recurrent = gated_delta_rule(
        q, k, v=v, g=log_decay(rows, weights), beta=rows.b.float().sigmoid(), state=before.recurrent
    )
    normed = gated_rms_norm(out, weights.norm, gate=rows.z, eps=weights.eps)
    if into is None:
        return normed, DeltaState(recurrent, conv)
    into.recurrent.copy_(recurrent)
    into.conv.copy_(conv)
    return normed, into


def mix_verify(
    rows: ProjectedRows,
    weights: MixerWeights,
    *,
    before: DeltaState,
    into: DeltaRecord | None = None,
) -> tuple[Tensor, DeltaRecord]:
    """As `mix_commit`, but with a record of the rows, in `into` or new, and no state after them."""
    y, _ = causal_conv(rows.qkv, before.conv, taps=weights.taps)
    q, k, v = split_heads(y, weights.heads)
    g, beta = log_decay(rows, weights), rows.b.float().sigmoid()
    out, _ = gated_delta_rule(q, k, v=v, g=g, beta=beta, state=before.recurrent)
    normed = gated_rms_norm(out, weights.norm, gate=rows.z, eps=weights.eps)
    mixed = torch.cat([x.flatten(1) for x in (q, k, v)], dim=1)
    record = DeltaRecord(weights.heads, rows.qkv, mixed, g, beta)
    if into is None:
        return normed, record
    into.copy_(record)
    return normed, into


def replay(
    record: DeltaRecord, *, rows: int, before: DeltaState, into: DeltaState | None = None
) -> DeltaState:
    """The state after the first `rows` rows of a record.

    Args:
        record: of `mix_verify` from `before`.
        rows: 1 to T.
        before: the state to start from; stays as it is.
        into: where the new state goes; new tensors without it.
    """
    k, v, g, beta = (x[:rows] for x in (record.k, record.v, record.g, record.beta))
    _, recurrent = gated_delta_rule(k, k, v=v, g=g, beta=beta, state=before.recurrent)
    conv = conv_after(record.inputs[:rows], before.conv)
    if into is None:
        return DeltaState(recurrent, conv)
    into.recurrent.copy_(recurrent)
    into.conv.copy_(conv)
    return into


def replay_layers(
    record: LayeredRecord, *, rows: int, before: LayeredStates, into: LayeredStates
) -> None:
    """`replay` of every layer; `into` is another place than `before`."""
    for each, start, end in zip(record.layers, before.layers, into.layers, strict=True):
        replay(each, rows=rows, before=start, into=end)


def conv_after(inputs: Tensor, conv_state: Tensor) -> Tensor:
    """The conv state [J - 1, C] behind `inputs` [T, C] of the convolution."""
    kept = len(conv_state)
    return torch.cat([conv_state, inputs[-kept:].float()])[-kept:]


def log_decay(rows: ProjectedRows, weights: MixerWeights) -> Tensor:
    """g [T, H_v] float32 = -exp(A_log) * softplus(a + dt_bias)."""
    return weights.rate * F.softplus(rows.a.float() + weights.dt_bias)


def split_heads(y: Tensor, heads: HeadShape) -> tuple[Tensor, Tensor, Tensor]:
    """Rows [T, C] of a convolution as q and k [T, H_k, Dk] of unit length and v [T, H_v, Dv]."""
    keys = 2 * heads.key_heads * heads.key_dim
    both = l2_norm(y[:, :keys].view(len(y), 2 * heads.key_heads, heads.key_dim))
    q, k = both.chunk(2, dim=1)
    return q, k, y[:, keys:].view(len(y), heads.value_heads, heads.value_dim)


def gated_delta_rule(
    q: Tensor, k: Tensor, *, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """As `gated_delta_recurrent`, by rows or by chunks: whatever is faster on a CPU."""
    if len(q) <= RECURRENT_ROWS:
        return gated_delta_recurrent(q, k, v=v, g=g, beta=beta, state=state)
    size = 32 if len(q) <= 32 else 64
    return gated_delta_chunked(q, k, v=v, g=g, beta=beta, state=state, chunk_size=size)


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
