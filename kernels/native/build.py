"""Kernels for this CPU: which instructions it has, and machine code made for them at run time.

triton, a dependency on Linux x86-64, carries LLVM with the x86 code generator and a linker, so that
nobody needs a C compiler. One module takes 20 to 70 ms to compile, and is compiled once a process,
when the first weight of its kind is multiplied; caching files would save little and can go wrong.
The parts of triton that are called are private: pyproject.toml holds it to the minor version that
they were tested with.
"""

import ctypes
import os
import platform
import sys
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from clover_local.kernels.native.matmul import TRIPLE, module
from clover_local.kernels.native.unpack import Shape, Variant

CPU_INFO = Path("/proc/cpuinfo")


@dataclass(frozen=True)
class Target:
    """A family of CPUs, and the tile that suits its registers."""

    name: str
    cpu: str  # as LLVM calls it
    flags: tuple[str, ...]  # as /proc/cpuinfo calls what it needs
    shape: Shape


AVX512 = Target(
    "AVX-512",
    "x86-64-v4",
    ("avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl", "avx2", "fma", "f16c", "bmi2"),
    Shape(
        lanes=16, weight_rows=4, unpacked_rows=5, direct_rows=10, multiplied_rows=6, permutes=True
    ),
)
AVX2 = Target(
    "AVX2",
    "x86-64-v3",
    ("avx2", "fma", "f16c", "bmi1", "bmi2", "movbe", "abm"),
    Shape(
        lanes=8, weight_rows=4, unpacked_rows=2, direct_rows=4, multiplied_rows=2, permutes=False
    ),
)


@dataclass(frozen=True)
class Missing:
    """Why there is no machine code."""

    reason: str


@dataclass(frozen=True, eq=False)
class Kernel:
    """Compiled code: addresses of `void f(int64 *call)`; see `matmul.py` for what they do."""

    target: Target
    worker: int
    spread: int
    library: ctypes.CDLL  # holds the code in memory


@cache
def find_target() -> Target | Missing:
    """The best target that this machine runs."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return Missing(f"{sys.platform} on {platform.machine()}, not Linux on x86-64")
    try:
        text = CPU_INFO.read_text(encoding="utf-8")
    except OSError as error:
        return Missing(f"{CPU_INFO} cannot be read ({error.strerror})")
    return target_for(text)


def target_for(cpu_info: str) -> Target | Missing:
    """The best target for a machine with this text in /proc/cpuinfo."""
    lines = [line for line in cpu_info.splitlines() if line.startswith("flags")]
    flags = set(lines[0].split()) if lines else set()
    for target in (AVX512, AVX2):
        if flags.issuperset(target.flags):
            return target
    return Missing("the CPU has neither AVX-512 nor AVX2 with FMA")


@cache
def build(variant: Variant, target: Target) -> Kernel | Missing:
    """Compiles, links and loads the kernel for weights of one kind."""
    try:
        from triton._C.libtriton import amd, llvm
    except ImportError:
        return Missing("triton, whose compiler makes the kernels, is not installed")
    text = module(variant, target.shape)
    try:
        llvm.init_targets()
        # (module, triple, CPU, features, flags, whether to fuse a * b + c, whether to make an
        # object file)
        code: bytes = llvm.translate_to_asm(text, TRIPLE, target.cpu, "", [], False, True)
        with tempfile.TemporaryDirectory(prefix="clover-local-") as folder:
            made, linked = os.path.join(folder, "kernel.o"), os.path.join(folder, "kernel.so")
            Path(made).write_bytes(code)
            amd.link_hsaco(made, linked)  # lld for ELF, of whatever machine
            library = ctypes.CDLL(linked)
    except (AttributeError, TypeError, RuntimeError, OSError) as error:
        return Missing(f"compiling the kernels failed ({error})")
    worker, spread = (
        ctypes.cast(function, ctypes.c_void_p).value or 0
        for function in (library.worker, library.spread)
    )
    return Kernel(target, worker, spread, library)
