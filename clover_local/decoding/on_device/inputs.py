"""What the host tells the device for a pick: one run of bytes, which one copy moves."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from clover_local.decoding.controls import Controls, ResponseControls
from clover_local.kernels.gpu.sampling.controls import ControlTensors
from clover_local.kernels.gpu.sampling.draw import DrawTensors

NO_TOKEN = -1  # fills lists of ids: the kernels leave out what is no token
_ALIGNMENT = 16


@dataclass(frozen=True)
class Room:
    """How much fits the buffers; more needs new ones, and all is captured anew."""

    rows: int = 32
    banned: int = 32
    stop_ids: int = 8
    seen: int = 1024

    def doubled_for(self, needed: "Room") -> "Room":
        """Each size, doubled until the needed one fits."""

        def doubled(size: int, least: int) -> int:
            while size < least:
                size *= 2
            return size

        return Room(
            rows=doubled(self.rows, needed.rows),
            banned=doubled(self.banned, needed.banned),
            stop_ids=doubled(self.stop_ids, needed.stop_ids),
            seen=doubled(self.seen, needed.seen),
        )


class Inputs:
    """What the host tells the device, by name: arrays here, tensors of the same bytes there."""

    def __init__(self, room: Room, *, device: torch.device) -> None:
        fields: dict[str, tuple[torch.dtype, int]] = {
            "block": (torch.int64, room.rows),
            "drafts": (torch.int64, room.rows),
            "positions": (torch.int64, room.rows),
            "stop_bias": (torch.float32, room.rows),
            "think_end_bias": (torch.float32, room.rows),
            "threshold": (torch.float32, 1),
            "temperature": (torch.float32, 1),
            "top_k": (torch.int32, 1),
            "top_p": (torch.float64, 1),
            "seed": (torch.uint64, 1),
            "pass_number": (torch.int32, 1),
            "penalties": (torch.float32, 3),
            "seen_count": (torch.int32, 1),
            "think_end_ids": (torch.int64, 1),
            "stop_ids": (torch.int64, room.stop_ids),
            "banned": (torch.int64, room.banned),
            "seen": (torch.int64, room.seen),  # these last: they need not always be sent
            "counts": (torch.float32, room.seen),
        }
        starts, end = dict[str, int](), 0
        for name, (dtype, length) in fields.items():
            starts[name] = end
            end += -(length * dtype.itemsize // -_ALIGNMENT) * _ALIGNMENT
        pinned = device.type == "cuda"
        self._host = torch.zeros(end, dtype=torch.uint8, pin_memory=pinned)
        self._device = torch.zeros(end, dtype=torch.uint8, device=device)
        self._without_seen = starts["seen"]
        self.there: dict[str, Tensor] = {}
        self.here: dict[str, NDArray[Any]] = {}
        for name, (dtype, length) in fields.items():
            part = slice(starts[name], starts[name] + length * dtype.itemsize)
            self.there[name] = self._device[part].view(dtype)
            self.here[name] = self._host[part].view(dtype).numpy()

    def fill(
        self, controls: ResponseControls, *, rows: int, visible: Sequence[int], pass_number: int
    ) -> None:
        """Everything that the first `rows` of a forward need, but the block."""
        first = controls.length + 1
        acting = controls.at(range(first, first + rows), visible=visible)
        self._fill(controls, acting, rows=rows, pass_number=pass_number)

    def fill_along(self, controls: ResponseControls, drafts: Sequence[int]) -> None:
        """Everything that causal rows of a pending token and these drafts need.

        The rows may not differ by what the response has: that is for one history of all rows.
        """
        rows = len(drafts) + 1
        self.here["drafts"][:rows] = [*drafts, NO_TOKEN]
        self._fill(controls, controls.along(drafts), rows=rows, pass_number=0)

    def _fill(
        self, controls: ResponseControls, acting: Controls, *, rows: int, pass_number: int
    ) -> None:
        here, settings, first = self.here, controls.settings, controls.length + 1
        seen, end = len(acting.seen), acting.think_end_token_id
        here["positions"][:rows] = np.arange(first, first + rows)
        for name in ("stop_bias", "think_end_bias"):
            bias: Tensor | None = getattr(acting, name)
            here[name][:rows] = 0 if bias is None else bias.numpy()
        if acting.stop_banned is not None:
            here["stop_bias"][:rows][acting.stop_banned.numpy()] = -np.inf
        here["threshold"][0] = settings.threshold
        here["temperature"][0] = settings.temperature
        here["top_k"][0] = min(settings.top_k, settings.vocab_size)
        here["top_p"][0] = settings.top_p
        here["seed"][0] = settings.seed
        here["pass_number"][0] = pass_number
        here["penalties"][:] = (
            acting.presence_penalty,
            acting.frequency_penalty,
            acting.repetition_penalty,
        )
        here["think_end_ids"][0] = NO_TOKEN if end is None else end
        for name in ("stop_ids", "banned"):
            ids: Tensor = getattr(acting, name)
            here[name][: len(ids)] = ids.numpy()
            here[name][len(ids) :] = NO_TOKEN
        here["seen_count"][0] = seen
        here["seen"][:seen] = acting.seen.numpy()
        here["counts"][:seen] = acting.counts.numpy()

    def send(self) -> None:
        """One copy, which does not wait."""
        used = slice(None) if self.here["seen_count"][0] else slice(self._without_seen)
        self._device[used].copy_(self._host[used], non_blocking=True)

    def controls(self, rows: int) -> ControlTensors:
        """As the kernels take them."""
        there = self.there
        return ControlTensors(
            banned=there["banned"],
            seen=there["seen"],
            counts=there["counts"],
            seen_count=there["seen_count"],
            penalties=there["penalties"],
            stop_ids=there["stop_ids"],
            stop_bias=there["stop_bias"][:rows],
            think_end_ids=there["think_end_ids"],
            think_end_bias=there["think_end_bias"][:rows],
        )

    def draws(self, rows: int) -> DrawTensors:
        """As the kernel takes them."""
        there = self.there
        return DrawTensors(
            temperature=there["temperature"],
            top_k=there["top_k"],
            top_p=there["top_p"],
            seed=there["seed"].view(torch.int64),
            pass_number=there["pass_number"],
            positions=there["positions"][:rows],
        )
