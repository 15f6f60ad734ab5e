"""o = softmax(q keys^T / sqrt(Dh)) values, causal or over all keys.

q [T, H, Dh]; keys and values [L, H_kv, Dh], of which the last T are the rows of q themselves. A key
head serves H / H_kv query heads.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


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
