"""o = softmax(q keys^T / sqrt(Dh)) values, causal or over all keys.

q [T, H, Dh]; keys and values [L, H_kv, Dh], of which the last T are the rows of q themselves. A key
head serves H / H_kv query heads. `attend_commit` and `attend_preview` are all that an attention
layer does with its cache, and the gate.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, eq=False)
class KeysValues:
    """A layer's cache: buffers that have room, and how many of their rows are committed."""

    keys: Tensor  # [N, H_kv, Dh]
    values: Tensor  # [N, H_kv, Dh]
    length: Tensor  # [1] int32, on the same device
    spare: bool = False
    """Whether nobody needs what lies behind the committed rows, so that a preview may use it."""


@dataclass(frozen=True, eq=False)
class AttentionRows:
    """A pass's rows: q and k normed and rotated."""

    q: Tensor  # [T, H, Dh]
    k: Tensor  # [T, H_kv, Dh]
    v: Tensor  # [T, H_kv, Dh]
    gate: Tensor  # [T, H, Dh]


def attend_commit(rows: AttentionRows, cache: KeysValues) -> Tensor:
    """Token-causal, times sigmoid(gate); writes the rows' keys and values behind the committed.

    Returns:
        [T, H, Dh]. `cache.length` stays: whoever commits the rows moves it.
    """
    start = int(cache.length)
    end = start + len(rows.q)
    cache.keys[start:end] = rows.k
    cache.values[start:end] = rows.v
    attended = causal_attention(rows.q, cache.keys[:end], values=cache.values[:end])
    return attended * rows.gate.sigmoid()


def attend_preview(rows: AttentionRows, cache: KeysValues) -> Tensor:
    """Each row sees all committed rows and the whole block; times sigmoid(gate).

    Writes nothing, or into the spare rows: a copy of all committed ones would cost as much as the
    attention to them.

    Returns:
        [T, H, Dh].
    """
    length, end = int(cache.length), int(cache.length) + len(rows.q)
    if cache.spare and end <= len(cache.keys):
        keys, values = cache.keys[:end], cache.values[:end]
        keys[length:], values[length:] = rows.k, rows.v
    else:
        keys = torch.cat([cache.keys[:length], rows.k])
        values = torch.cat([cache.values[:length], rows.v])
    return block_attention(rows.q, keys, values=values) * rows.gate.sigmoid()


def causal_attention(q: Tensor, keys: Tensor, *, values: Tensor) -> Tensor:
    """Row t sees the L - T committed rows, and the new rows up to itself: [T, H, Dh]."""
    rows, length = len(q), len(keys)
    if rows == 1:
        return block_attention(q, keys, values=values)
    if rows == length:
        return _attention(q, keys, values=values, mask=None, is_causal=True)
    mask = torch.ones(rows, length, dtype=torch.bool, device=q.device).tril(length - rows)
    return _attention(q, keys, values=values, mask=mask, is_causal=False)


def block_attention(q: Tensor, keys: Tensor, *, values: Tensor) -> Tensor:
    """Every row sees every key, committed or of the block: [T, H, Dh]."""
    return _attention(q, keys, values=values, mask=None, is_causal=False)


def _attention(
    q: Tensor, keys: Tensor, *, values: Tensor, mask: Tensor | None, is_causal: bool
) -> Tensor:
    q, keys, values = (x.transpose(0, 1)[None] for x in (q, keys, values))  # [1, H, T, Dh]
    out = F.scaled_dot_product_attention(
        q, keys, values, attn_mask=mask, is_causal=is_causal, enable_gqa=True
    )
    return out[0].transpose(0, 1)
