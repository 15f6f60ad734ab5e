"""The machine itself, asked without torch: Python, the card by NVML, memory, disk."""

import ctypes
import os
import platform
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from clover_local.doctor.finding import Finding
from clover_local.memory import machine
from clover_local.memory.sizes import GIB

MIN_PYTHON = (3, 11)
MIN_CAPABILITY = (8, 0)
"""Kernels copy asynchronously and calculate in bfloat16."""
MIN_DRIVER = 580
"""Of CUDA 13, which this version's torch is built for on Linux."""
DISK_BYTES = 25 * 10**9
"""A GGUF file of the 35B model, its sidecar, and some room."""
MEMORY_BYTES = 20 * GIB
"""The 35B model's experts that a 16 GB card does not hold, and the program."""


def findings() -> Iterator[Finding]:
    """What can be said without torch, line by line."""
    yield python()
    yield from card(machine.open_nvml())
    yield memory(machine.free_memory())
    yield disk(hub_cache())


def python() -> Finding:
    """The interpreter and the system."""
    ok = sys.version_info[:2] >= MIN_PYTHON
    text = f"{platform.python_version()} on {platform.platform(terse=True)} {platform.machine()}"
    return Finding("Python", ok, text, "install Python 3.11 or newer", required=True)


def card(library: Any) -> Iterator[Finding]:
    """Driver, card, capability and link; `library` None: there is no driver."""
    if library is None or (found := machine.read_card(library, machine.first_card())) is None:
        remedy = f"everything runs on the CPU; for a card install NVIDIA's driver {MIN_DRIVER}+"
        yield Finding("driver", False, "no NVIDIA driver answers", remedy)
        return
    driver, capability, link = ask(library, machine.first_card())
    major = driver.partition(".")[0]
    yield Finding(
        "driver",
        major.isdecimal() and int(major) >= MIN_DRIVER,
        driver or "of unknown version",
        f"install {MIN_DRIVER} or newer, which CUDA 13 needs",
    )
    display = ", a display is attached" if found.has_display else ""
    yield Finding(
        "card",
        found.cap > 2 * GIB,
        f"{found.name}, {_gigabytes(found.total)}, {_gigabytes(found.free)} free{display}",
        "close what uses the card, or pass --device cpu",
    )
    yield Finding(
        "capability",
        capability >= MIN_CAPABILITY,
        ".".join(map(str, capability)),
        "the kernels need 8.0 (RTX 30) or newer: pass --device cpu",
    )
    width, widest, generation, newest = link
    yield Finding(
        "link",
        width == widest and width > 0,
        f"PCIe {generation} x{width}, the card has PCIe {newest} x{widest} "
        "(a card at rest shows an older generation)",
        "put the card in the slot nearest to the CPU: experts come over this link",
    )


def ask(library: Any, index: int) -> tuple[str, tuple[int, int], tuple[int, int, int, int]]:
    """(driver, capability, link) of a card; link: lanes now and at most, generation likewise."""
    if library.nvmlInit_v2() != 0:
        return "", (0, 0), (0, 0, 0, 0)
    try:
        handle, text = ctypes.c_void_p(), ctypes.create_string_buffer(96)
        library.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle))
        library.nvmlSystemGetDriverVersion(text, ctypes.c_uint(len(text)))

        def number(name: str) -> int:
            value = ctypes.c_uint()
            code = getattr(library, name)(handle, ctypes.byref(value))
            return value.value if code == 0 else 0

        major, minor = ctypes.c_int(), ctypes.c_int()
        library.nvmlDeviceGetCudaComputeCapability(handle, ctypes.byref(major), ctypes.byref(minor))
        link = (
            number("nvmlDeviceGetCurrPcieLinkWidth"),
            number("nvmlDeviceGetMaxPcieLinkWidth"),
            number("nvmlDeviceGetCurrPcieLinkGeneration"),
            number("nvmlDeviceGetMaxPcieLinkGeneration"),
        )
        return text.value.decode(errors="replace"), (major.value, minor.value), link
    finally:
        library.nvmlShutdown()


def memory(free: int | None) -> Finding:
    """Host memory that is free."""
    if free is None:
        return Finding("memory", False, "the system does not say what is free", "see its monitor")
    remedy = "close programs: the 35B model beside a 16 GB card takes 20 GB; `clover-local plan`"
    return Finding("memory", free >= MEMORY_BYTES, f"{_gigabytes(free)} free", remedy)


def disk(folder: Path) -> Finding:
    """Space where models are downloaded to."""
    place = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(place).free
    remedy = "free 25 GB for a model (90 GB to quantize one), or set HF_HOME to another disk"
    return Finding("disk", free >= DISK_BYTES, f"{_gigabytes(free)} free in {folder}", remedy)


def hub_cache() -> Path:
    """Where huggingface_hub keeps models, without importing it."""
    home = os.environ.get("HF_HOME") or os.path.join(
        os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "huggingface"
    )
    return Path(os.environ.get("HF_HUB_CACHE") or os.path.join(home, "hub")).absolute()


def _gigabytes(nbytes: int) -> str:
    return f"{nbytes / 1e9:.1f} GB"
