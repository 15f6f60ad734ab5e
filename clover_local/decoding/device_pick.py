"""The pick where the logits are: at most one upload a block, one launch and one wait a pass.

What the host knows (counts, biases, settings, the block) is packed into one run of bytes, which one
copy moves when a block begins. Within the block the device keeps all of it up to date by itself: a
pass is the replay of one CUDA graph (sample, draw, accept, and the copy of the report to the host).
So with the rule `threshold`. Other rules see the same statistics on the host, and the block is sent
anew each pass; what needs more than the kernels know is picked by plain PyTorch (`HostPicker`).
Without CUDA the same kernels run in Triton's interpreter.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from clover_local.decoding.controls import ResponseControls
from clover_local.decoding.host_pick import HostPicker
from clover_local.decoding.pick import Accept, DeviceBlock, RowStatistics, no_numbers
from clover_local.decoding.rules.most_confident import MOST_CONFIDENT
from clover_local.decoding.rules.threshold import ABOVE
from clover_local.kernels.gpu.replay import Replay
from clover_local.kernels.gpu.sampling import accept
from clover_local.kernels.gpu.sampling.controls import ControlTensors
from clover_local.kernels.gpu.sampling.draw import DrawTensors, draw
from clover_local.kernels.gpu.sampling.sample import TOP, sample

REASONS = {accept.STAYS: "", accept.ABOVE: ABOVE, accept.MOST_CONFIDENT: MOST_CONFIDENT}
NO_TOKEN = -1  # fills lists of ids: the kernels leave out what is no token
KEPT_REPLAYS = 16
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
        here, settings, first = self.here, controls.settings, controls.length + 1
        acting = controls.at(range(first, first + rows), visible=visible)
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


@dataclass(frozen=True)
class _Launch:
    """What is frozen in a captured pick; logits and block by their addresses."""

    rows: int
    draws: bool
    logits: tuple[int, int, int, torch.dtype]  # address, row stride, vocabulary
    block: int | None
    mask_token_id: int


class DevicePicker:
    """A `Picker` of the kernels in `kernels/gpu/sampling`, for one sequence at a time.

    It may serve one run after another, with other settings. Whatever interrupts a pick, the next
    one sends everything anew.
    """

    def __init__(self, device: torch.device, *, room: Room | None = None) -> None:
        """`room` is what buffers hold at first; they grow."""
        self.device = device
        self._plain = HostPicker()
        self._for_rules = HostPicker(self.pick)
        self._pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
        self._replays = OrderedDict[_Launch, Replay[Tensor]]()
        self._logits: Tensor | None = None  # while they are picked from
        self._in_flight = False  # the device may still read or write host memory
        self._known: object = None  # what the device is prepared for; None: nothing
        self._make(room or Room())

    @torch.inference_mode()
    def pick(
        self,
        logits: Tensor,
        controls: ResponseControls,
        *,
        rows: Sequence[int],
        visible: Sequence[int] = (),
        pass_number: int = 0,
    ) -> RowStatistics:
        """See `Picker`."""
        if controls.settings.dry_multiplier > 0:  # costs of single rows, which no kernel takes
            return self._plain.pick(
                logits, controls, rows=rows, visible=visible, pass_number=pass_number
            )
        count = len(logits)
        self._prepare(controls, rows=count)
        self._inputs.fill(controls, rows=count, visible=visible, pass_number=pass_number)
        self._send()
        words = self._run(logits, controls, block=None)[list(rows)]
        return _statistics(words, rows, controls, top=min(TOP, logits.shape[1]))

    @torch.inference_mode()
    def pick_block(
        self,
        logits: Tensor,
        controls: ResponseControls,
        *,
        block: Sequence[int],
        rows: Sequence[int],
        on_device: DeviceBlock | None,
        pass_number: int,
    ) -> tuple[RowStatistics, Accept]:
        """See `Picker`; `on_device` gets the accepted tokens.

        Raises:
            ValueError: `on_device` does not hold `block`.
        """
        if not controls.settings.plain_threshold:
            self._known = None
            return self._for_rules.pick_block(
                logits,
                controls,
                block=block,
                rows=rows,
                on_device=on_device,
                pass_number=pass_number,
            )
        block, count = list(block), len(block)
        if on_device is not None and on_device.host != block:
            raise ValueError(f"the device has the block {on_device.host}, the host {block}")
        known = (controls, controls.length, on_device, block, pass_number)
        if self._known != known:
            self._prepare(controls, rows=count)
            self._inputs.here["block"][:count] = block
            self._inputs.fill(controls, rows=count, visible=block, pass_number=pass_number)
            self._send()
        self._known = None
        if on_device is None:
            ids = self._inputs.there["block"][:count]
        else:
            ids, on_device.host = on_device.ids, []
        words = self._run(logits, controls, block=ids)[list(rows)]
        statistics = _statistics(words, rows, controls, top=min(TOP, logits.shape[1]))
        tokens, reasons = words[:, accept.TOKEN].tolist(), words[:, accept.REASON].tolist()
        for row, token, reason in zip(rows, tokens, reasons, strict=True):
            if reason:
                block[row] = token
        left = int(words[0, accept.MASKED_LEFT])
        if left != reasons.count(accept.STAYS):
            raise RuntimeError(
                f"{left} masked rows on the device, {reasons.count(accept.STAYS)} on the host"
            )
        self._known = (controls, controls.length, on_device, block, pass_number + 1)
        if on_device is not None:
            on_device.host = list(block)
        return statistics, Accept(
            torch.from_numpy(words[:, accept.REASON] != accept.STAYS),
            tuple(REASONS[reason] for reason in reasons),
        )

    def _prepare(self, controls: ResponseControls, *, rows: int) -> None:
        """Makes sure that host memory may be written and that everything fits."""
        self._known = None
        self._wait()
        settings = controls.settings
        room = self._room.doubled_for(
            Room(
                rows=rows,
                banned=len(settings.banned_ids),
                stop_ids=len(settings.stop_ids),
                seen=controls.distinct,
            )
        )
        if room != self._room:
            self._make(room)

    @torch.inference_mode()
    def _make(self, room: Room) -> None:
        """New buffers."""
        self._replays.clear()
        self._room = room
        self._inputs = Inputs(room, device=self.device)
        self._rows = torch.arange(room.rows, device=self.device)
        shape, pinned = (room.rows, accept.WORDS), self.device.type == "cuda"
        self._report = torch.zeros(shape, dtype=torch.int32, device=self.device)
        self._host_report = torch.zeros(shape, dtype=torch.int32, pin_memory=pinned)
        self._words: NDArray[np.int32] = self._host_report.numpy()

    def _send(self) -> None:
        self._in_flight = True
        self._inputs.send()

    def _run(
        self, logits: Tensor, controls: ResponseControls, *, block: Tensor | None
    ) -> NDArray[np.int32]:
        """The report of every row; valid until the next run."""
        rows, vocabulary = logits.shape
        launch = _Launch(
            rows=rows,
            draws=controls.settings.temperature > 0,
            logits=(logits.data_ptr(), logits.stride(0), vocabulary, logits.dtype),
            block=None if block is None else block.data_ptr(),
            mask_token_id=controls.settings.mask_token_id,
        )
        replay = self._replays.get(launch)
        if replay is None:
            replay = Replay(
                partial(self._launch, launch, block), device=self.device, pool=self._pool
            )
            self._replays[launch] = replay
            if len(self._replays) > KEPT_REPLAYS:
                self._replays.popitem(last=False)
        self._replays.move_to_end(launch)
        self._logits, self._in_flight = logits, True
        try:
            replay()
            self._wait()
        finally:
            self._logits = None  # a replay that kept them would hold their memory
        return self._words

    def _launch(self, launch: _Launch, block: Tensor | None) -> Tensor:
        """Sample, draw and accept, and the report to the host; waits for nothing."""
        assert self._logits is not None
        rows, inputs = self._rows[: launch.rows], self._inputs
        controls, packed = inputs.controls(launch.rows), self._report[: launch.rows]
        sampled, summary = sample(self._logits, controls, rows=rows)
        if launch.draws:
            draw(
                self._logits,
                controls,
                rows=rows,
                settings=inputs.draws(launch.rows),
                sampled=sampled,
                summary=summary,
            )
        if block is None:
            accept.report_rows(sampled, report=packed)
        else:
            accept.accept(
                sampled,
                block=block,
                mask_token_id=launch.mask_token_id,
                threshold=inputs.there["threshold"],
                think_end_ids=controls.think_end_ids,
                think_end_bias=controls.think_end_bias,
                pass_number=inputs.there["pass_number"],
                report=packed,
            )
        self._host_report[: launch.rows].copy_(packed, non_blocking=True)
        return packed

    def _wait(self) -> None:
        if self._in_flight and self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
        self._in_flight = False


def _statistics(
    words: NDArray[np.int32], rows: Sequence[int], controls: ResponseControls, *, top: int
) -> RowStatistics:
    """The statistics of `rows`, of their own `words` of a report."""
    floats = words.view(np.float32)
    broken = np.isnan(floats[:, accept.CONFIDENCE])
    if broken.any():
        raise no_numbers(controls.length + rows[int(broken.argmax())] + 1)
    ids = slice(accept.TOP_IDS, accept.TOP_IDS + top)
    probabilities = slice(accept.TOP_PROBABILITIES, accept.TOP_PROBABILITIES + top)
    return RowStatistics(
        token=torch.from_numpy(words[:, accept.TOKEN].astype(np.int64)),
        confidence=torch.from_numpy(floats[:, accept.CONFIDENCE]),
        raw_confidence=torch.from_numpy(floats[:, accept.RAW_CONFIDENCE]),
        entropy=torch.from_numpy(floats[:, accept.ENTROPY]),
        top_ids=torch.from_numpy(words[:, ids].astype(np.int64)),
        top_probabilities=torch.from_numpy(floats[:, probabilities]),
    )
