"""The pick by plain PyTorch, wherever the logits are; the rule runs on the host."""

from collections.abc import Sequence

from torch import Tensor

from clover_local.decoding.controls import ResponseControls
from clover_local.decoding.pick import Accept, DeviceBlock, RowStatistics, pick
from clover_local.decoding.threshold import threshold


class HostPicker:
    """A `Picker` that takes any device's logits and keeps nothing there."""

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
        positions = [controls.length + row + 1 for row in rows]
        return pick(
            logits,
            controls.at(positions, visible=visible).to(logits.device),
            controls.settings,
            rows=rows,
            positions=positions,
            pass_number=pass_number,
        ).cpu()

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
        """See `Picker`; a block on the device is left as it is."""
        statistics = self.pick(logits, controls, rows=rows, visible=block, pass_number=pass_number)
        return statistics, threshold(statistics, threshold=controls.settings.threshold)
