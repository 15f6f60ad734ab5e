"""What an attention layer does with its cache, and the gate: three launches or, to read only, two.

Defined by `attend_commit` and `attend_preview` (the plain operators).
"""

from torch import Tensor

from clover_local.kernels.block_attention import AttentionRows, KeysValues
from clover_local.kernels.gpu.attention.append_rows import append_rows
from clover_local.kernels.gpu.attention.block_attention import block_attention, causal_attention


def attend_commit(rows: AttentionRows, cache: KeysValues) -> Tensor:
    """As the plain operator of this name; the length stays on the device."""
    append_rows(
        rows.k,
        rows.v,
        cached_keys=cache.keys,
        cached_values=cache.values,
        length=cache.length,
    )
    return causal_attention(
        rows.q,
        rows.k,
        values=rows.v,
        cached_keys=cache.keys,
        cached_values=cache.values,
        length=cache.length,
        gate=rows.gate,
    )


def attend_preview(rows: AttentionRows, cache: KeysValues) -> Tensor:
    """As the plain operator of this name; the length stays on the device."""
    return block_attention(
        rows.q,
        rows.k,
        values=rows.v,
        cached_keys=cache.keys,
        cached_values=cache.values,
        length=cache.length,
        gate=rows.gate,
    )
