"""Where Triton's kernels run in tests, and bfloat16 in its interpreter.

The interpreter of triton 3.7 keeps a bfloat16 as its 16 bits in an unsigned integer, and calculates
with those: sums, products, comparisons, matrix products and most conversions come out silently
wrong, and constants cannot be made at all. The fixture below makes it calculate in float32 and
round each result to the nearest bfloat16, as a card does. `test_bfloat16.py` is its test.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import triton
import triton.language as tl
from numpy.typing import NDArray
from triton._C.libtriton import ir
from triton.runtime.interpreter import InterpreterBuilder, ReduceScanOpInterface, TensorHandle

CALCULATING = ("binary_op", "ternary_op", "unary_op", "create_fma", "create_dot", "create_rsqrt")


@pytest.fixture
def device() -> str:
    """Where kernels run: a GPU, or the CPU for the interpreter."""
    return "cpu" if triton.knobs.runtime.interpret else "cuda"


@pytest.fixture(autouse=True)
def bfloat16_in_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the interpreter calculate with bfloat16 numbers, not with their bits."""
    for name in CALCULATING:
        monkeypatch.setattr(InterpreterBuilder, name, in_float32(getattr(InterpreterBuilder, name)))
    for name in ("cast_impl", "create_fp_to_fp"):
        monkeypatch.setattr(InterpreterBuilder, name, converted(getattr(InterpreterBuilder, name)))
    monkeypatch.setattr(InterpreterBuilder, "get_bf16", get_bf16, raising=False)
    apply = ReduceScanOpInterface.apply
    monkeypatch.setattr(ReduceScanOpInterface, "apply", reduced_in_float32(apply))


def widen(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    """bfloat16 to float32, exact: the bits are the upper half."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def narrow(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """float32 to the nearest bfloat16, to the even one if two are as near; NaN stays NaN."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = ((bits.astype(np.uint64) + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    rounded = np.where(np.isnan(values), np.uint16(0x7FC0), rounded)
    return rounded.reshape(np.shape(values))


def is_bfloat16(x: object) -> bool:
    """Whether `x` is an interpreted value of bfloat16 numbers, not of pointers to them."""
    return isinstance(x, TensorHandle) and x.dtype.scalar == tl.bfloat16


def in_float32(method: Callable[..., TensorHandle]) -> Callable[..., TensorHandle]:
    """An operator whose operands are widened, and whose result is rounded if it is a bfloat16."""

    def run(self: InterpreterBuilder, *arguments: Any) -> TensorHandle:
        if not any(map(is_bfloat16, arguments)):
            return method(self, *arguments)
        wide = [TensorHandle(widen(x.data), tl.float32) if is_bfloat16(x) else x for x in arguments]
        result = method(self, *wide)
        # A result has the type of the last operand: of the sum, where a product is added to one.
        last = [x for x in arguments if isinstance(x, TensorHandle)][-1]
        if result.data.dtype == np.bool_ or not is_bfloat16(last):
            return result
        return TensorHandle(narrow(result.data), tl.bfloat16)

    return run


def converted(method: Callable[..., TensorHandle]) -> Callable[..., TensorHandle]:
    """A conversion that goes through float32 on its way from or to bfloat16."""

    def run(self: InterpreterBuilder, x: TensorHandle, to: tl.dtype, *rest: Any) -> TensorHandle:
        if rest == (ir.ROUNDING_MODE.RTZ,):
            return method(self, x, to, *rest)
        if x.dtype.scalar == tl.bfloat16:
            x = TensorHandle(widen(x.data), tl.float32)
        if to.scalar == tl.bfloat16:
            return TensorHandle(narrow(x.data.astype(np.float32)), tl.bfloat16)
        return x if x.dtype.scalar == to.scalar else method(self, x, to, *rest)

    return run


def get_bf16(self: InterpreterBuilder, value: float) -> TensorHandle:
    """A constant, which the interpreter lacks."""
    return TensorHandle(narrow(np.array([value], dtype=np.float32)), tl.bfloat16)


def reduced_in_float32(apply: Callable[..., Any]) -> Callable[..., Any]:
    """A reduction or scan that runs in float32, its result rounded once."""

    def run(self: ReduceScanOpInterface, x: Any) -> Any:
        if isinstance(x, tuple) or x.dtype != tl.bfloat16:
            return apply(self, x)
        wide = self.to_tensor(widen(x.handle.data), tl.float32)
        return self.to_tensor(narrow(apply(self, wide).handle.data), tl.bfloat16)

    return run
