"""A memory plan and its words: the budget that it keeps to, its parts by name, its sums."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

from clover_local.errors import SettingsError
from clover_local.memory.model_bytes import ModelBytes
from clover_local.memory.sizes import MIB

DEVICE, HOST = "device", "host"

SLOTS, MAPS = "expert slots", "expert maps"
TRUNK, HEAD, SMALL, EMBEDDING = "trunk", "head", "small tensors", "embedding"
KEYS_VALUES, STATE, ROTARY = "keys and values", "recurrent and conv state", "rotary tables"
WORKSPACE, GRAPHS, STREAM = "workspace", "graph pool", "prompt streaming"
CONTEXT = "CUDA context and reserve"
OFF_DEVICE, RING = "experts off the device", "staging ring"
CHECKPOINT_PART, PROGRAM = "state checkpoints", "program"

PROGRAM_BYTES = 1536 * MIB
"""Python, torch and CUDA's libraries on the host; assumed."""
CHECKPOINTS = 8
"""Of the state, that `cache.py` keeps in host memory."""
LEAST_CONTEXT = 1024
"""Tokens below which no plan advises to go."""


@dataclass(frozen=True)
class Budget:
    """What a plan may use, in bytes.

    `device` is all that the process may take of the card, `host` all that it may take of RAM.
    `pin_limit` is the most pinned memory; None: three quarters of `host`. `prefill_rows` are the
    rows of a prompt's chunk; None: the most that leave room. Without `cuda` the slots are host
    memory too, and there are neither a CUDA context nor graphs. `slots` is how many experts are to
    have one; None: as many as fit. Plain PyTorch picks `pick_rows` rows at once, where the kernels
    do not.
    """

    device: int
    host: int
    context: int
    pin_limit: int | None = None
    prefill_rows: int | None = None
    cuda: bool = True
    embedding_on_host: bool = True
    checkpoints: int = CHECKPOINTS
    program: int = PROGRAM_BYTES
    slots: int | None = None
    pick_rows: int = 0


@dataclass(frozen=True)
class Part:
    """One kind of memory: where it lies and how much it is."""

    name: str
    where: str
    bytes: int
    pinned: bool = False


@dataclass(frozen=True)
class Plan:
    """What lies where, for one context.

    `slots_per_layer` are the slots that each layer has on average; no layer falls below `floor` of
    them. `permanent_per_layer` of them keep their expert for good. `staged_bytes` of the experts
    off the device are not pinned and travel through the ring; `disk_bytes` of these do not fit into
    RAM either. With `fits` false, `problem` says what is too small, and there are no slots.
    """

    model: ModelBytes = field(repr=False)
    budget: Budget
    parts: tuple[Part, ...]
    prefill_rows: int
    slots_per_layer: tuple[int, ...] = ()
    permanent_per_layer: tuple[int, ...] = ()
    floor: int = 0
    staged_bytes: int = 0
    disk_bytes: int = 0
    problem: str | None = None
    advice: tuple[str, ...] = ()

    @property
    def fits(self) -> bool:
        """Whether the model runs with this plan."""
        return self.problem is None

    @property
    def context(self) -> int:
        """Tokens of prompt and answer together."""
        return self.budget.context

    @property
    def slots(self) -> int:
        """Expert slots in all."""
        return sum(self.slots_per_layer)

    @property
    def device_parts(self) -> dict[str, int]:
        """Bytes on the device by name."""
        return {part.name: part.bytes for part in self.parts if part.where == DEVICE}

    @property
    def host_parts(self) -> dict[str, int]:
        """Bytes in host memory by name."""
        return {part.name: part.bytes for part in self.parts if part.where == HOST}

    @property
    def device_bytes(self) -> int:
        """All on the device."""
        return sum(self.device_parts.values())

    @property
    def host_bytes(self) -> int:
        """All in host memory; memory maps of files, which the system may drop, not counted."""
        return sum(self.host_parts.values())

    @property
    def pinned_bytes(self) -> int:
        """Pinned host memory."""
        return sum(part.bytes for part in self.parts if part.pinned)

    @property
    def resident_share(self) -> float:
        """The share of the experts' bytes that the slots hold."""
        held = held_bytes(self.model, self.slots_per_layer)
        return held / self.model.experts if self.model.experts else 0.0

    def require_fit(self) -> None:
        """Raises SettingsError with what would make it fit, if it does not."""
        if self.problem is not None:
            raise SettingsError(
                f"{self.problem}: {' or '.join(self.advice)}",
                keys={"context", "expert_slots", "gpu_memory"},
            )

    def to_json(self) -> dict[str, object]:
        """The plan with the keys that `plan --json` promises."""
        return {
            "fits": self.fits,
            "context": self.context,
            "parts": [asdict(part) for part in self.parts],
            "device_bytes": self.device_bytes,
            "host_bytes": self.host_bytes,
            "pinned_bytes": self.pinned_bytes,
            "resident_share": round(self.resident_share, 4),
            "slots": self.slots,
            "slots_per_layer": list(self.slots_per_layer),
            "permanent_per_layer": list(self.permanent_per_layer),
            "floor_per_layer": self.floor,
            "prefill_rows": self.prefill_rows,
            "advice": list(self.advice),
        }


def held_bytes(model: ModelBytes, slots: Sequence[int]) -> float:
    """Bytes of experts in so many slots of each layer, of average experts."""
    count = model.config.num_experts
    return sum(nbytes * n / count for nbytes, n in zip(model.layer_bytes, slots, strict=False))
