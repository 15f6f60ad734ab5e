"""NF4 of bitsandbytes: 16 values at the quantiles of a normal distribution, scaled by block.

Only a baseline of the report: it needs no calibration, and the runtime has no such weights, so what
comes back is the rounded weight itself.
"""

import importlib

from torch import Tensor

from clover_local.errors import CloverError


def nf4_round(weight: Tensor, *, block_size: int = 64) -> Tensor:
    """The weights [..., N, K] that NF4 stands for, float32: each block of a row by its maximum.

    Raises:
        ValueError: `block_size` does not divide K.
        CloverError: bitsandbytes is not installed.
    """
    if weight.shape[-1] % block_size:
        raise ValueError(f"block_size {block_size} does not divide the {weight.shape[-1]} columns")
    try:
        functional = importlib.import_module("bitsandbytes.functional")
    except ImportError:
        raise CloverError(
            "nf4 needs bitsandbytes: pip install 'clover-local[bitsandbytes]'"
        ) from None
    stored, state = functional.quantize_4bit(
        weight.float().contiguous(), blocksize=block_size, quant_type="nf4"
    )
    rounded: Tensor = functional.dequantize_4bit(stored, state)
    return rounded
