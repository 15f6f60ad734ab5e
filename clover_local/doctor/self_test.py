"""A program: some kernels against their definitions; prints one JSON object. See `runtime.py`."""

import json
import sys

import torch
from torch import Tensor

from clover_local.kernels import norms
from clover_local.kernels.native.build import Missing
from clover_local.kernels.native.launch import kernel_for
from clover_local.kernels.packed import PackedWeight
from clover_local.kernels.packed_linear import packed_linear, packed_linear_reference

ROWS, FEATURES, COLUMNS, GROUP_SIZE = 5, 64, 128, 32
TOLERANCE = 0.02
"""Of the largest value: bfloat16 keeps 8 bits."""


def main(what: str) -> dict[str, object]:
    """What came of the test: ok, and the text of its line."""
    return _cpu() if what == "cpu" else _triton(what)


def _cpu() -> dict[str, object]:
    weight, x = _weight(4, torch.device("cpu")), _rows(torch.float32, torch.device("cpu"))
    kernel = kernel_for(weight)
    if isinstance(kernel, Missing):
        return _line(False, f"plain PyTorch, which is slower: {kernel.reason}", "nothing to mend")
    off = _off(packed_linear(x, weight), packed_linear_reference(x, weight))
    return _line(off <= TOLERANCE, f"{kernel.target.name}, off by {off:.1e} of the largest value")


def _triton(what: str) -> dict[str, object]:
    try:
        from clover_local.kernels.gpu import operators
    except ImportError as error:
        return _line(False, f"no Triton here ({error})", "install triton; a CPU does without")
    device = torch.device("cuda" if what == "cuda" else "cpu")
    x = _rows(torch.bfloat16 if what == "cuda" else torch.float32, device)
    scale = torch.linspace(-1, 1, COLUMNS, device=device)
    offs = [_off(operators.rms_norm(x, scale, eps=1e-6), norms.rms_norm(x, scale, eps=1e-6))]
    for bits in (4, 8):
        weight = _weight(bits, device)
        offs.append(_off(operators.packed_linear(x, weight), packed_linear_reference(x, weight)))
    off = max(offs)
    return _line(off <= TOLERANCE, f"norm, INT4 and INT8, off by {off:.1e} of the largest value")


def _weight(bits: int, device: torch.device) -> PackedWeight:
    numbers = torch.Generator().manual_seed(bits)
    shape = (FEATURES, COLUMNS * bits // 32)
    words = torch.randint(-(1 << 31), (1 << 31) - 1, shape, generator=numbers, dtype=torch.int32)
    scale = torch.rand(FEATURES, COLUMNS // GROUP_SIZE, generator=numbers) / (1 << bits)
    packed = PackedWeight(words.to(device), scale.bfloat16().to(device), None, bits, GROUP_SIZE)
    return packed.aligned() if device.type == "cuda" else packed


def _rows(dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(1)).to(device, dtype)


def _off(found: Tensor, expected: Tensor) -> float:
    difference = (found.float() - expected.float()).abs().max()
    return float(difference / expected.float().abs().max())


def _line(ok: bool, text: str, remedy: str = "") -> dict[str, object]:
    return {"ok": ok, "text": text, "remedy": remedy}


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])))
