"""How a layer takes its parameters out of a checkpoint's: by name, packed or plain."""

from collections.abc import Callable

from torch import Tensor

from clover_local.kernels.packed import Weight

Take = Callable[[str], Weight]
"""Gives a parameter by its name within a layer."""


def take_float32(take: Take, name: str) -> Tensor:
    """A parameter that is never quantized and always float32: a norm, the router, a GDN vector.

    Raises:
        ValueError: it is packed.
    """
    weight = take(name)
    if not isinstance(weight, Tensor):
        raise ValueError(f"{name} is packed to {weight.bits} bits, it has to be plain")
    return weight.float()
