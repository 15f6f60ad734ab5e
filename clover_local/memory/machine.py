"""The card and the memory of this machine, asked without torch: NVML through ctypes, /proc.

Rates are what the card's numbers promise, less what PCIe loses; `clover-local bench` measures.
"""

import ctypes
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clover_local.memory.sizes import GIB, MIB

TARGET_CAP = 15360 * MIB
"""What is planned for of a 16 GB card: 15,888 MiB are visible, about 15,750 of them free."""
CAP_SHARE = 15 / 16
"""Of a card's nominal memory, as for the target."""
FREE_SHARE = 39 / 40
"""Of what NVML calls free: others, and the driver, may want a little more."""
DISPLAY_BYTES = 512 * MIB
"""Left to a display: what it shows grows and shrinks."""
SYSTEM_BYTES = 2 * GIB
"""Of installed memory, for the system."""

_LANE = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}
_LINK_SHARE = 0.825  # 52 of 63 GB/s on PCIe 5 x16
_MEMORY_CLOCK = 2  # NVML_CLOCK_MEM
_MEMINFO = Path("/proc/meminfo")


@dataclass(frozen=True)
class Card:
    """A CUDA device: its memory in bytes, its rates in bytes a second where they are known."""

    name: str
    total: int
    free: int
    has_display: bool = False
    bandwidth: float | None = None
    link: float | None = None

    @property
    def cap(self) -> int:
        """What to plan for of the memory that is free now."""
        return max(0, int(self.free * FREE_SHARE) - (DISPLAY_BYTES if self.has_display else 0))


class _Memory(ctypes.Structure):
    _fields_ = (
        ("total", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    )


def find_card() -> Card | None:
    """The card that CUDA would use first; None where there is no NVIDIA driver."""
    library = open_nvml()
    return None if library is None else read_card(library, first_card())


def open_nvml() -> ctypes.CDLL | None:
    """The driver's library; None where there is no NVIDIA driver."""
    try:
        return ctypes.CDLL("nvml.dll" if sys.platform == "win32" else "libnvidia-ml.so.1")
    except OSError:
        return None


def first_card() -> int:
    """The number of the card that CUDA would use first."""
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    return int(first) if first.isdecimal() else 0


def read_card(library: Any, index: int) -> Card | None:
    """Card number `index`, from NVML; None where it does not answer."""
    if library.nvmlInit_v2() != 0:
        return None
    try:
        handle, memory = ctypes.c_void_p(), _Memory()
        if library.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle)) != 0:
            return None
        if library.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)) != 0:
            return None
        return _described(library, handle, memory)
    finally:
        library.nvmlShutdown()


def free_memory() -> int | None:
    """Host memory that programs can still have; None where the system does not say."""
    try:
        text = _MEMINFO.read_text(encoding="ascii")
    except OSError:
        return None
    match = re.search(r"^MemAvailable:\s*(\d+) kB$", text, re.MULTILINE)
    return int(match[1]) * 1024 if match else None


def _described(library: Any, handle: ctypes.c_void_p, memory: _Memory) -> Card:
    def ask(name: str, *arguments: int) -> int | None:
        value = ctypes.c_uint()
        code = getattr(library, name)(handle, *arguments, ctypes.byref(value))
        return value.value if code == 0 else None

    name = ctypes.create_string_buffer(96)
    library.nvmlDeviceGetName(handle, name, ctypes.c_uint(len(name)))
    width = ask("nvmlDeviceGetMemoryBusWidth")
    clock = ask("nvmlDeviceGetMaxClockInfo", _MEMORY_CLOCK)  # MHz, two transfers a cycle
    lanes = ask("nvmlDeviceGetMaxPcieLinkWidth")
    lane = _LANE.get(ask("nvmlDeviceGetMaxPcieLinkGeneration") or 0)
    return Card(
        name=name.value.decode(errors="replace") or "CUDA device",
        total=memory.total,
        free=memory.free,
        has_display=bool(ask("nvmlDeviceGetDisplayActive")),
        bandwidth=width / 8 * clock * 2e6 if width and clock else None,
        link=lanes * lane * _LINK_SHARE if lanes and lane else None,
    )
