"""The card as NVML describes it, by a double of its library."""

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from clover_local.memory import machine
from clover_local.memory.machine import DISPLAY_BYTES, Card, find_card, free_memory, read_card
from clover_local.memory.sizes import GIB, MIB

FAILED = 999


class Nvml:
    """Answers as a driver with one RTX 5070 Ti would; functions in `failing` fail."""

    def __init__(self, *failing: str, display: int = 0) -> None:
        self.failing = failing
        self.numbers = {
            "nvmlDeviceGetMemoryBusWidth": 256,
            "nvmlDeviceGetMaxClockInfo": 14001,
            "nvmlDeviceGetMaxPcieLinkWidth": 16,
            "nvmlDeviceGetMaxPcieLinkGeneration": 5,
            "nvmlDeviceGetDisplayActive": display,
        }
        self.is_open = False

    def __getattr__(self, name: str) -> Callable[..., int]:
        def call(*arguments: Any) -> int:
            if name in self.failing:
                return FAILED
            if name in self.numbers:
                arguments[-1]._obj.value = self.numbers[name]
            return 0

        return call

    def nvmlInit_v2(self) -> int:
        self.is_open = "nvmlInit_v2" not in self.failing
        return 0 if self.is_open else FAILED

    def nvmlShutdown(self) -> int:
        self.is_open = False
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index: int, handle: Any) -> int:
        return FAILED if index else 0

    def nvmlDeviceGetMemoryInfo(self, handle: Any, memory: Any) -> int:
        if "nvmlDeviceGetMemoryInfo" in self.failing:
            return FAILED
        memory._obj.total, memory._obj.free = 15888 * MIB, 15750 * MIB
        return 0

    def nvmlDeviceGetName(self, handle: Any, name: Any, size: Any) -> int:
        name.value = b"NVIDIA GeForce RTX 5070 Ti"
        return 0


def test_the_target_is_recognised_with_its_rates() -> None:
    library = Nvml()
    card = read_card(library, 0)
    assert card is not None
    assert (card.name, card.total) == ("NVIDIA GeForce RTX 5070 Ti", 15888 * MIB)
    assert card.bandwidth == pytest.approx(896e9, rel=1e-3)
    assert card.link == pytest.approx(52e9, rel=1e-3)
    assert card.cap == pytest.approx(15360 * MIB, rel=1e-3)
    assert not library.is_open


def test_a_display_has_memory_of_its_own() -> None:
    plain, shared = (read_card(Nvml(display=display), 0) for display in (0, 1))
    assert plain is not None
    assert shared is not None
    assert plain.cap - shared.cap == DISPLAY_BYTES
    assert Card("full", total=GIB, free=0, has_display=True).cap == 0


@pytest.mark.parametrize("failing", ["nvmlInit_v2", "nvmlDeviceGetMemoryInfo"])
def test_a_driver_that_does_not_answer_is_no_card(failing: str) -> None:
    library = Nvml(failing)
    assert read_card(library, 0) is None
    assert not library.is_open


def test_a_card_that_is_not_there_is_no_card() -> None:
    assert read_card(Nvml(), 3) is None


def test_a_rate_that_the_driver_does_not_tell_is_unknown() -> None:
    card = read_card(Nvml("nvmlDeviceGetMemoryBusWidth", "nvmlDeviceGetMaxPcieLinkWidth"), 0)
    assert card is not None
    assert (card.bandwidth, card.link) == (None, None)


def test_the_first_visible_card_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Nvml())
    for visible, found in (("0", True), ("3,0", False), ("GPU-1a2b", True)):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert (find_card() is not None) == found


def test_a_machine_without_the_driver_has_no_card(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise OSError("no such library")

    monkeypatch.setattr(ctypes, "CDLL", absent)
    assert find_card() is None


def test_free_memory_is_what_the_system_calls_available(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "meminfo"
    monkeypatch.setattr(machine, "_MEMINFO", path)
    assert free_memory() is None
    path.write_text("MemTotal:  64 kB\nMemAvailable:    32 kB\n", encoding="ascii")
    assert free_memory() == 32 * 1024
    path.write_text("nothing of the kind", encoding="ascii")
    assert free_memory() is None
