"""What launchers ask of their tensors before they hand pointers to a kernel."""

from collections.abc import Sequence

import torch
from torch import Tensor

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
ALIGNMENT = 16
"""Bytes: what an asynchronous copy moves at once."""


def check_float(name: str, x: Tensor) -> None:
    """`x` has one of the dtypes that rows have.

    Raises:
        ValueError: it has another one.
    """
    if x.dtype not in FLOATS:
        raise ValueError(f"{name} is {x.dtype}, not one of {', '.join(map(str, FLOATS))}")


def check_aligned(name: str, x: Tensor) -> None:
    """`x` starts at a multiple of 16 bytes.

    Raises:
        ValueError: it does not.
    """
    if x.data_ptr() % ALIGNMENT:
        raise ValueError(
            f"{name} starts {x.data_ptr() % ALIGNMENT} bytes behind a multiple of {ALIGNMENT}"
        )


def check_rows(name: str, x: Tensor, *, shape: Sequence[int], like: Tensor) -> None:
    """`x` has this shape, the dtype and device of `like`, and no gaps in its last dimension.

    Raises:
        ValueError: it has not.
    """
    if x.shape != torch.Size(shape):
        raise ValueError(f"{name} is {list(x.shape)}, not {list(shape)}")
    check_float(name, x)
    if x.dtype != like.dtype:
        raise ValueError(f"{name} is {x.dtype}, the rows beside it are {like.dtype}")
    if x.device != like.device:
        raise ValueError(f"{name} is on {x.device}, the rows beside it on {like.device}")
    if x.shape[-1] > 1 and x.stride(-1) != 1:
        raise ValueError(f"{name} has a last stride of {x.stride(-1)}, not 1")


def check_dense(
    name: str,
    x: Tensor,
    *,
    shape: Sequence[int],
    like: Tensor,
    dtype: torch.dtype = torch.float32,
) -> None:
    """`x` has this shape and dtype, the device of `like`, and no gaps at all.

    Raises:
        ValueError: it has not.
    """
    if x.shape != torch.Size(shape):
        raise ValueError(f"{name} is {list(x.shape)}, not {list(shape)}")
    if x.dtype != dtype:
        raise ValueError(f"{name} is {x.dtype}, not {dtype}")
    if x.device != like.device:
        raise ValueError(f"{name} is on {x.device}, the rows beside it on {like.device}")
    if not x.is_contiguous():
        raise ValueError(f"{name} has strides {x.stride()}, contiguous ones are needed")


def check_heads(name: str, x: Tensor, *, shape: Sequence[int], like: Tensor) -> None:
    """`x` [T, H, D] is float32 and a row's heads have no gaps; rows may be apart.

    Raises:
        ValueError: it is not so.
    """
    check_dense(name, x[:1], shape=(1, *shape[1:]), like=like)
    if x.shape != torch.Size(shape):
        raise ValueError(f"{name} is {list(x.shape)}, not {list(shape)}")


def check_words(name: str, x: Tensor) -> None:
    """Rows of the last dimension start at multiples of 16 bytes, as asynchronous copies need.

    Raises:
        ValueError: one does not.
    """
    check_aligned(name, x)
    row = x.shape[-1] * x.element_size()
    if row % ALIGNMENT:
        raise ValueError(f"{name} has rows of {row} bytes, no multiple of {ALIGNMENT}")


def check_operand(name: str, x: Tensor, *, device: torch.device) -> None:
    """`x` is on this device, has no gaps and starts at a multiple of 16 bytes; any shape and dtype.

    Raises:
        ValueError: it is not so.
    """
    if x.device != device:
        raise ValueError(f"{name} is on {x.device}, the rows on {device}")
    if not x.is_contiguous():
        raise ValueError(f"{name} has strides {x.stride()} for {tuple(x.shape)}, not contiguous")
    check_aligned(name, x)
