"""`CLOVER_KERNELS`: the user's word on which implementation of an operator runs."""

import os

VARIABLE = "CLOVER_KERNELS"


def reference_only() -> bool:
    """Whether only plain PyTorch may run."""
    return os.environ.get(VARIABLE) == "reference"


def check_choice() -> None:
    """Checks the variable.

    Raises:
        ValueError: it asks for kernels that do not exist.
    """
    choice = os.environ.get(VARIABLE, "reference")
    if choice == "triton":
        raise ValueError(f"{VARIABLE}=triton: no operator is called in Triton yet, unset it")
    if choice != "reference":
        raise ValueError(f"{VARIABLE}={choice}: the choices are reference and triton")
