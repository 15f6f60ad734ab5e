"""`CLOVER_KERNELS`: the user's word on which implementation of an operator runs.

Unset, tensors on a GPU go through Triton's kernels, those on a CPU through PyTorch and the kernels
that are compiled for it. `reference` takes plain PyTorch everywhere, `triton` takes Triton's
everywhere: without a GPU in its interpreter, which is slow and there for tests.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor

VARIABLE = "CLOVER_KERNELS"
CHOICES = ("reference", "triton")
INTERPRETER = "TRITON_INTERPRET"


def reference_only() -> bool:
    """Whether only plain PyTorch may run."""
    return os.environ.get(VARIABLE) == "reference"


def on_gpu(x: Tensor) -> bool:
    """Whether Triton's kernels run on tensors like `x`."""
    choice = os.environ.get(VARIABLE)
    return choice == "triton" or (choice is None and x.is_cuda)


def check_name() -> None:
    """Checks the variable's word alone; needs no torch.

    Raises:
        ValueError: it asks for kernels that do not exist.
    """
    choice = os.environ.get(VARIABLE)
    if choice is not None and choice not in CHOICES:
        raise ValueError(f"{VARIABLE}={choice}: the choices are {' and '.join(CHOICES)}")


def check_choice(device: torch.device, dtype: torch.dtype) -> None:
    """Checks the variable for a model on `device` whose hidden states are `dtype`.

    Raises:
        ValueError: it asks for kernels that do not exist, or that cannot run there.
    """
    import torch

    check_name()
    if os.environ.get(VARIABLE) == "triton" and device.type == "cpu":
        if os.environ.get(INTERPRETER) != "1":
            raise ValueError(
                f"{VARIABLE}=triton on a CPU runs in Triton's interpreter: set {INTERPRETER}=1 as "
                f"well, or unset {VARIABLE}"
            )
        if dtype == torch.bfloat16:
            raise ValueError(
                f"{VARIABLE}=triton on a CPU: Triton's interpreter is wrong about bfloat16: use "
                "float32"
            )
