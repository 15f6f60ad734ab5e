"""Where the parts of a model go: the memory plan that loading follows, and what it came to.

Planned before a weight is read, so that what does not fit is refused at once. Where nothing limits
the memory, as on a CPU without flags, there is no plan: weights stay in the memory map.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from clover_local.checkpoint.summary import summarize
from clover_local.config import ModelConfig
from clover_local.errors import SettingsError
from clover_local.memory import machine
from clover_local.memory.model_bytes import from_summary
from clover_local.memory.parts import Budget, Plan
from clover_local.memory.planner import plan as make_plan
from clover_local.memory.workspace import PREFILL_ROWS
from clover_local.residency.names import DEFAULT_POLICY, POLICY_NAMES

if TYPE_CHECKING:
    from clover_local.checkpoint.placements import Checkpoint

DEVICES = ("cpu", "cuda")
DTYPES = ("float32", "bfloat16")
PLANNED_CONTEXT = 32768
"""The context where memory is planned and none is asked for, or all that the model has."""
UNLIMITED = 1 << 60
"""Bytes of device memory where only the slots are limited."""


@dataclass(frozen=True)
class MemoryOptions:
    """What the user said about memory; None: not given."""

    device_bytes: int | None = None
    """The most that the model may take of the device: of a card, or on a CPU of its memory."""
    expert_slots: int | None = None
    pin_limit: int | None = None  # bytes
    policy: str | None = None
    profile: Path | None = None

    @property
    def given(self) -> tuple[str, ...]:
        """The flags that were given, as in the command line without dashes."""
        flags = {
            "gpu_memory": self.device_bytes,
            "expert_slots": self.expert_slots,
            "pin_limit": self.pin_limit,
            "policy": self.policy,
            "expert_profile": self.profile,
        }
        return tuple(name for name, value in flags.items() if value is not None)


@dataclass(frozen=True)
class Placement:
    """What goes where."""

    device: str
    dtype: str
    context: int
    plan: Plan | None  # None: nothing limits the memory
    options: MemoryOptions

    @property
    def offloads(self) -> bool:
        """Whether some experts are not on the device."""
        plan = self.plan
        if plan is None:
            return False
        return plan.slots < sum(r.experts for layer in plan.model.records for r in layer)

    @property
    def policy(self) -> str:
        """Which experts may stay."""
        return self.options.policy or DEFAULT_POLICY

    @property
    def line(self) -> str | None:
        """Where the experts are, for people; None where there is nothing to say."""
        if self.plan is None or not self.offloads:
            return None
        plan = self.plan
        total = sum(r.experts for layer in plan.model.records for r in layer)
        return (
            f"experts: {plan.slots:,} of {total:,} fit on the device "
            f"({100 * plan.resident_share:.0f} %), the others are copied when they are asked for; "
            f"policy {self.policy}, context {plan.context:,}"
        )

    def without_effect(self) -> list[tuple[str, str]]:
        """The memory flags that change nothing, each with the reason."""
        on_cpu = self.device == "cpu"
        resident = "while every expert is on the device"
        reasons = {
            "pin_limit": "on a CPU, which pins no memory" if on_cpu else resident,
            "policy": resident,
            "expert_profile": resident,
        }
        return [
            (name, reasons[name])
            for name in self.options.given
            if name in reasons and (not self.offloads or (name == "pin_limit" and on_cpu))
        ]


def check_context(context: int, config: ModelConfig) -> None:
    """Raises SettingsError for a context that is longer than the model's."""
    most = config.max_position_embeddings
    if context > most:
        raise SettingsError(
            f"--context {context} exceeds the model's {most}: pass at most that", keys={"context"}
        )


def place(
    checkpoint: Checkpoint,
    config: ModelConfig,
    *,
    device: str,
    dtype: str,
    context: int | None,
    options: MemoryOptions,
    pick_rows: int = 0,
    find_card: Callable[[], machine.Card | None] = machine.find_card,
) -> Placement:
    """Plans the memory of a model.

    Args:
        device: `cpu` or `cuda`.
        dtype: of activations: `float32` or `bfloat16`.
        context: tokens of prompt and answer; None: what is usual.
        pick_rows: that plain PyTorch picks at once on a card; 0: the kernels pick.

    Raises:
        SettingsError: it does not fit, or an option cannot be met; says what would help.
    """
    _check(options, config)
    most = config.max_position_embeddings
    limits = options.device_bytes is not None or options.expert_slots is not None
    if device == "cpu" and not limits:
        return Placement(device, dtype, context or most, None, options)
    card = find_card() if device == "cuda" else None
    cap = options.device_bytes
    if cap is None:
        cap = UNLIMITED if device == "cpu" else card.cap if card is not None else _free(device)
    host = machine.free_memory()
    budget = Budget(
        device=cap,
        host=UNLIMITED if host is None or device == "cpu" else host,
        context=context or min(PLANNED_CONTEXT, most),
        pin_limit=options.pin_limit,
        prefill_rows=PREFILL_ROWS if device == "cpu" else None,
        cuda=device == "cuda",
        embedding_on_host=device == "cuda",
        slots=options.expert_slots,
        pick_rows=pick_rows if device == "cuda" else 0,
    )
    number_bytes = 4 if dtype == "float32" else 2
    summary = summarize(checkpoint, device=device)
    plan = make_plan(from_summary(config, summary, number_bytes=number_bytes), budget)
    plan.require_fit()
    return Placement(device, dtype, plan.context, plan, options)


def _check(options: MemoryOptions, config: ModelConfig) -> None:
    if options.policy is not None and options.policy not in POLICY_NAMES:
        raise SettingsError(
            f"--policy {options.policy} is unknown: use one of {', '.join(POLICY_NAMES)}",
            keys={"policy"},
        )
    if options.policy == "static" and options.profile is None:
        raise SettingsError(
            "--policy static keeps the experts of a profile: pass --expert-profile FILE, which "
            "`clover-local simulate TRACE --save-profile FILE` writes",
            keys={"policy"},
        )
    layers, slots = config.num_hidden_layers, options.expert_slots
    if slots is not None and not layers <= slots <= layers * config.num_experts:
        raise SettingsError(
            f"--expert-slots {slots}: this model can have {layers} (one a layer) to "
            f"{layers * config.num_experts} (all)",
            keys={"expert_slots"},
        )


def _free(device: str) -> int:
    """What torch says is free on a card that NVML does not know."""
    import torch

    return int(torch.cuda.mem_get_info(device)[0] * machine.FREE_SHARE)
