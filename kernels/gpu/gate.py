"""What the compile gate compiles: one kernel at one shipped configuration."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class GateCase:
    """A kernel, the types and constants of its arguments, and its launch options.

    Pointers are taken to be multiples of 16 bytes, and so are sizes and strides that the kernel
    lets Triton specialize: those of the real model are multiples of 16.
    """

    name: str
    fn: Any  # the `@triton.jit` function
    signature: Mapping[str, str]  # argument to "*bf16", "i32", "fp32", ... or "constexpr"
    constexprs: Mapping[str, Any]
    num_warps: int
    num_stages: int
    wants_cp_async: bool = False
