"""What `plan` plans for: the machine that its flags describe, this one, or the target card."""

from dataclasses import dataclass

from clover_local.errors import SettingsError
from clover_local.memory import machine
from clover_local.memory.predict import Rates
from clover_local.memory.sizes import (
    GIB,
    parse_capacity,
    parse_rate,
    parse_size,
    shown_mib,
    shown_rate,
)

ASSUMED_RAM = 32 * GIB


@dataclass(frozen=True)
class Target:
    """What to plan for, in bytes and bytes a second; `assumed` says what was not given or found."""

    name: str
    device: int
    host: int
    rates: Rates
    assumed: tuple[str, ...]


def find_target(
    *,
    gpu: str | None,
    gpu_memory: str | None,
    ram: str | None,
    link: str | None,
    bandwidth: str | None,
) -> Target:
    """The machine that the flags describe, this one where they do not, else the target card's."""
    card = machine.find_card() if gpu is None else None
    assumed = []
    if gpu is not None:
        capacity = parse_capacity(gpu, "--gpu")
        name, device = f"a card of {gpu}", int(capacity * machine.CAP_SHARE)
    elif card is not None:
        name, capacity, device = card.name, card.total, card.cap
    else:
        capacity = device = machine.TARGET_CAP
        name = "a 16 GB card"
        if gpu_memory is None:
            assumed.append("no NVIDIA card was found here: planned for one of 16 GB")
    if gpu_memory is not None:
        device = parse_size(gpu_memory, "--gpu-memory")
        if device > capacity and (gpu is not None or card is not None):
            raise SettingsError(
                f"--gpu-memory {gpu_memory} is more than the card's {shown_mib(capacity)}: "
                "pass at most that"
            )
        name = f"{gpu_memory} of {name}" if gpu or card else f"a card with {gpu_memory}"
    rates = Rates(
        device=parse_rate(bandwidth, "--bandwidth")
        if bandwidth
        else (card and card.bandwidth) or Rates.device,
        link=parse_rate(link, "--link") if link else (card and card.link) or Rates.link,
    )
    if not (rates.device > 0 and rates.link > 0):
        raise SettingsError("--bandwidth and --link of 0 move nothing: pass what the card has")
    if card is None and not (bandwidth and link):
        assumed.append(
            f"{shown_rate(rates.device)} of memory bandwidth and {shown_rate(rates.link)} "
            "over the link, unless --bandwidth and --link say otherwise"
        )
    return Target(name, device, _host(ram, card is not None, assumed), rates, tuple(assumed))


def _host(ram: str | None, is_this_machine: bool, assumed: list[str]) -> int:
    """Host memory to plan with."""
    free = machine.free_memory() if is_this_machine else None
    if ram is None and free is not None:
        return free
    if ram is None:
        assumed.append("32 GB of host memory, unless --ram says otherwise")
    installed = ASSUMED_RAM if ram is None else parse_capacity(ram, "--ram")
    return max(0, installed - machine.SYSTEM_BYTES)
