"""What the passes of a model return."""

from dataclasses import dataclass, replace

from torch import Tensor

from clover_local.cache import VerifyRecord
from clover_local.decoding.pick import DeviceBlock


@dataclass(frozen=True, eq=False)
class PassOutput:
    """What a pass over T rows returns; `rows` are T, or fewer where fewer logits were asked for."""

    logits: Tensor  # [rows, V]: float32, or on a GPU the model's dtype
    expert_ids: tuple[Tensor, ...]  # per layer [T, A]: -1 where a row used fewer than A experts
    coreset_masks: tuple[Tensor, ...] = ()  # previews with coresets: per layer [E] bool

    distinct_experts: Tensor | None = None  # scalar, summed over layers: of a preview on a GPU
    block: DeviceBlock | None = None  # where a preview read its tokens, if a later one reads there

    @property
    def coresets(self) -> tuple[Tensor, ...]:
        """Per layer the experts that the block could use, ascending ids. Waits for the device."""
        return tuple(mask.nonzero()[:, 0] for mask in self.coreset_masks)

    def of_block(self, block: DeviceBlock) -> "PassOutput":
        """The same, of a preview that read its tokens from `block`."""
        return replace(self, block=block)


@dataclass(frozen=True, eq=False, kw_only=True)
class VerifyOutput(PassOutput):
    """What a verify returns: the logits of all its rows, and what `accept` takes."""

    record: VerifyRecord
