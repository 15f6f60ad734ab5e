"""What the doctor says of the machine, by a double of NVML."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from clover_local.doctor import machine
from clover_local.memory.sizes import GIB, MIB


class Nvml:
    """A driver with one RTX 5070 Ti on `lanes` lanes."""

    def __init__(self, *, driver: str = "580.65.06", lanes: int = 16, capability: int = 12) -> None:
        self.driver = driver.encode()
        self.capability = capability
        self.numbers = {
            "nvmlDeviceGetMemoryBusWidth": 256,
            "nvmlDeviceGetMaxClockInfo": 14001,
            "nvmlDeviceGetCurrPcieLinkWidth": lanes,
            "nvmlDeviceGetMaxPcieLinkWidth": 16,
            "nvmlDeviceGetCurrPcieLinkGeneration": 1,
            "nvmlDeviceGetMaxPcieLinkGeneration": 5,
            "nvmlDeviceGetDisplayActive": 1,
        }

    def __getattr__(self, name: str) -> Callable[..., int]:
        def call(*arguments: Any) -> int:
            if name in self.numbers:
                arguments[-1]._obj.value = self.numbers[name]
            return 0

        return call

    def nvmlSystemGetDriverVersion(self, text: Any, size: Any) -> int:
        text.value = self.driver
        return 0

    def nvmlDeviceGetName(self, handle: Any, text: Any, size: Any) -> int:
        text.value = b"NVIDIA GeForce RTX 5070 Ti"
        return 0

    def nvmlDeviceGetMemoryInfo(self, handle: Any, memory: Any) -> int:
        memory._obj.total, memory._obj.free = 15888 * MIB, 15750 * MIB
        return 0

    def nvmlDeviceGetCudaComputeCapability(self, handle: Any, major: Any, minor: Any) -> int:
        major._obj.value, minor._obj.value = self.capability, 0
        return 0


def lines(library: Any) -> dict[str, tuple[bool, str]]:
    return {each.name: (each.ok, each.text) for each in machine.card(library)}


def test_a_card_that_has_everything_is_well() -> None:
    said = lines(Nvml())
    assert all(ok for ok, _ in said.values())
    assert said["driver"][1] == "580.65.06"
    assert "RTX 5070 Ti, 16.7 GB" in said["card"][1] and "display" in said["card"][1]
    assert said["capability"][1] == "12.0"
    assert said["link"][1].startswith("PCIe 1 x16, the card has PCIe 5 x16")


@pytest.mark.parametrize(
    ("library", "name"),
    [
        (Nvml(driver="535.1"), "driver"),
        (Nvml(driver=""), "driver"),
        (Nvml(lanes=4), "link"),
        (Nvml(capability=7), "capability"),
    ],
    ids=["old", "unknown", "four lanes", "turing"],
)
def test_what_is_missing_has_its_remedy(library: Nvml, name: str) -> None:
    (found,) = [each for each in machine.card(library) if not each.ok]
    assert found.name == name
    assert found.remedy


def test_without_a_driver_one_line_says_so() -> None:
    (found,) = machine.card(None)
    assert not found.ok and not found.required
    assert "CPU" in found.remedy


def test_memory_and_disk_are_judged_by_what_the_model_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert machine.memory(21 * GIB).ok
    assert not machine.memory(19 * GIB).ok
    assert not machine.memory(None).ok
    monkeypatch.setattr(machine, "DISK_BYTES", 0)
    assert machine.disk(tmp_path / "not" / "there").ok
    monkeypatch.setattr(machine, "DISK_BYTES", 1 << 62)
    assert "HF_HOME" in machine.disk(tmp_path).remedy


def test_the_cache_is_where_huggingface_hub_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    if not os.environ.keys() & {"HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"}:
        assert machine.hub_cache() == Path(constants.HF_HUB_CACHE)
    monkeypatch.setenv("HF_HOME", "/models")
    assert machine.hub_cache() == Path("/models/hub")
