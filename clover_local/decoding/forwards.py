"""What decoding needs of a model: its forwards, and what they return."""

from collections.abc import Sequence
from typing import Literal, Protocol

import torch
from torch import Tensor

from clover_local.cache import SequenceState, VerifyRecord
from clover_local.config import ModelConfig
from clover_local.decoding.pick import DeviceBlock
from clover_local.experts.traffic import OffloadStats


class ForwardOutput(Protocol):
    """What a forward returns (see `model.output.PassOutput`)."""

    @property
    def logits(self) -> Tensor: ...
    @property
    def expert_ids(self) -> tuple[Tensor, ...]: ...
    @property
    def coresets(self) -> tuple[Tensor, ...]: ...
    @property
    def distinct_experts(self) -> Tensor | None:
        """Experts used, summed over layers: a scalar, where the forward has counted them."""

    @property
    def block(self) -> DeviceBlock | None:
        """The previewed block on the device, where the model keeps it there."""


class VerifiedOutput(ForwardOutput, Protocol):
    """What a verify returns (see `model.output.VerifyOutput`)."""

    @property
    def record(self) -> VerifyRecord: ...


class Model(Protocol):
    """What decoding needs of a model (see `model.clover.Clover`)."""

    @property
    def config(self) -> ModelConfig: ...
    @property
    def can_preview(self) -> bool: ...
    @property
    def device(self) -> torch.device: ...
    def commit(
        self,
        tokens: Sequence[int],
        state: SequenceState,
        *,
        logits: Literal["all", "last", "none"] = "last",
        kind: Literal["commit", "prompt"] = "commit",
    ) -> ForwardOutput: ...
    def preview(self, block: Sequence[int], state: SequenceState) -> ForwardOutput: ...
    def verify(self, tokens: Sequence[int], state: SequenceState) -> VerifiedOutput: ...
    def accept(self, record: VerifyRecord, rows: int, state: SequenceState) -> None: ...
    def offload_stats(self) -> OffloadStats | None:
        """What the expert cache did so far; None where every expert is on the device."""

    def give_up_memory(self) -> str | None:
        """Frees some of the device's memory, and says how; None where there is none to free."""
