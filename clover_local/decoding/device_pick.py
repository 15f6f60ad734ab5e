"""The pick where the logits are: at most one upload a block, one launch and one wait a pass.

What the host knows (counts, biases, settings, the block) is packed into one run of bytes, which one
copy moves when a block begins. Within the block the device keeps all of it up to date by itself: a
pass is the replay of one CUDA graph (sample, draw, accept, and the copy of the report to the host).
So with the rule `threshold`. A draft is proposed and judged likewise, each an upload, a graph and a
wait. Other rules see the same statistics on the host, and the block is sent anew each pass; what
needs more than the kernels know is picked by plain PyTorch (`HostPicker`). Without CUDA the same
kernels run in Triton's interpreter.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from clover_local.decoding.controls import ResponseControls
from clover_local.decoding.host_pick import HostPicker
from clover_local.decoding.on_device.inputs import Inputs, Room
from clover_local.decoding.pick import Accept, DeviceBlock, RowStatistics, no_numbers
from clover_local.decoding.rules.most_confident import MOST_CONFIDENT
from clover_local.decoding.rules.threshold import ABOVE
from clover_local.decoding.speculation.acceptance import Judged, judge_numbers
from clover_local.kernels.gpu.replay import Replay
from clover_local.kernels.gpu.sampling import accept
from clover_local.kernels.gpu.sampling.drafts import PROBABILITY, RAW_PROBABILITY, report_drafts
from clover_local.kernels.gpu.sampling.draw import draw
from clover_local.kernels.gpu.sampling.sample import TOP, sample

REASONS = {accept.STAYS: "", accept.ABOVE: ABOVE, accept.MOST_CONFIDENT: MOST_CONFIDENT}
KEPT_REPLAYS = 16


@dataclass(frozen=True)
class _Launch:
    """What is frozen in a captured pick; logits and block by their addresses."""

    rows: int
    draws: bool
    judges: bool
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
        draws = controls.settings.temperature > 0
        words = self._run(logits, controls, draws=draws)[list(rows)]
        return _statistics(words, rows, controls, top=min(TOP, logits.shape[1]))

    @torch.inference_mode()
    def propose(
        self, logits: Tensor, controls: ResponseControls, *, block: Sequence[int]
    ) -> RowStatistics:
        """See `Picker`."""
        if controls.settings.dry_multiplier > 0:
            return self._plain.propose(logits, controls, block=block)
        count = len(block) - 1
        self._prepare(controls, rows=count)
        self._inputs.fill(controls, rows=count, visible=block, pass_number=0)
        self._send()
        words = self._run(logits[1:], controls)[:count]
        return _statistics(words, range(count), controls, top=min(TOP, logits.shape[1]))

    @torch.inference_mode()
    def judge(self, logits: Tensor, controls: ResponseControls, *, drafts: Sequence[int]) -> Judged:
        """See `Picker`; plain PyTorch at a temperature, and where rows have histories of their own.

        A row's own history is what penalties count, and DRY.
        """
        settings = controls.settings
        if settings.temperature > 0 or controls.penalises or settings.dry_multiplier > 0:
            return self._plain.judge(logits, controls, drafts=drafts)
        count = len(drafts) + 1
        if count != len(logits):
            raise ValueError(f"{len(drafts)} drafts for {len(logits)} rows, not {len(logits) - 1}")
        self._prepare(controls, rows=count)
        self._inputs.fill_along(controls, drafts)
        self._send()
        words = self._run(logits, controls, judges=True)[:count].copy()
        floats = torch.from_numpy(words.view(np.float32))
        return judge_numbers(
            _statistics(words, range(count), controls, top=min(TOP, logits.shape[1])),
            settings,
            drafts=drafts,
            probability=floats[:-1, PROBABILITY],
            raw_probability=floats[:-1, RAW_PROBABILITY],
        )

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
        draws = controls.settings.temperature > 0
        words = self._run(logits, controls, block=ids, draws=draws)[list(rows)]
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
        self,
        logits: Tensor,
        controls: ResponseControls,
        *,
        block: Tensor | None = None,
        draws: bool = False,
        judges: bool = False,
    ) -> NDArray[np.int32]:
        """The report of every row; valid until the next run."""
        rows, vocabulary = logits.shape
        launch = _Launch(
            rows=rows,
            draws=draws,
            judges=judges,
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
            if launch.judges:
                report_drafts(
                    self._logits,
                    controls,
                    rows=rows,
                    drafts=inputs.there["drafts"][: launch.rows],
                    summary=summary,
                    report=packed,
                )
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
