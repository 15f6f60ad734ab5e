"""The one place where logits become tokens: bans, controls, argmax or draw, row statistics.

An unmasking rule sees `RowStatistics`, never logits, so a device kernel can make the same few
numbers.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from clover_local.decoding.controls import Controls
from clover_local.decoding.draw import draw
from clover_local.decoding.random import PICK, uniform
from clover_local.decoding.settings import Settings
from clover_local.errors import CloverError

TOP = 5


@dataclass(frozen=True)
class RowStatistics:
    """What one pass says about each row; all probabilities are at temperature 1, float32."""

    token: Tensor  # [rows] int64
    confidence: Tensor  # [rows] probability of `token` over the controlled logits
    raw_confidence: Tensor  # [rows] the same before the response controls (bans apply to both)
    entropy: Tensor  # [rows] nats, of the controlled distribution
    top_ids: Tensor  # [rows, 5] int64, by falling probability
    top_probabilities: Tensor  # [rows, 5]

    def cpu(self) -> "RowStatistics":
        """The same numbers in host memory."""
        return RowStatistics(*(getattr(self, field.name).cpu() for field in fields(self)))


@torch.inference_mode()
def pick(
    logits: Tensor,
    controls: Controls,
    settings: Settings,
    *,
    rows: Sequence[int],
    positions: Sequence[int],
    pass_number: int,
) -> RowStatistics:
    """A token for every row of `rows`, greedy at temperature 0 (lower id wins a tie), else drawn.

    Args:
        logits: [B, V]; left as they are.
        controls: built for `rows`.
        settings: temperature, top_k, top_p and seed are read.
        rows: which rows of `logits`, at least one.
        positions: the 1-based response position of each of `rows`.
        pass_number: pass in the block, from 0.

    Raises:
        CloverError: logits that are NaN or infinite, or a row in which every token is banned.
    """
    chosen = torch.tensor(rows, device=logits.device)
    controlled = controls.ban(logits[chosen].float())  # indexing copies
    raw = controlled.softmax(-1) if controls.act_on_response else None
    controlled = controls.apply(controlled)
    probabilities = controlled.softmax(-1)  # [rows, V]
    _refuse_nan(probabilities, positions)
    if settings.temperature > 0:
        uniforms = torch.tensor(
            [uniform(settings.seed, n, pass_number=pass_number, purpose=PICK) for n in positions],
            dtype=torch.float64,
        )
        token = draw(
            controlled,
            uniforms,
            temperature=settings.temperature,
            top_k=settings.top_k,
            top_p=settings.top_p,
        )
    else:
        token = controlled.argmax(-1)
    confidence = probabilities.gather(1, token[:, None])[:, 0]
    top = probabilities.topk(min(TOP, probabilities.shape[1]), dim=-1)
    return RowStatistics(
        token=token,
        confidence=confidence,
        raw_confidence=confidence if raw is None else raw.gather(1, token[:, None])[:, 0],
        entropy=torch.special.entr(probabilities).sum(-1),
        top_ids=top.indices,
        top_probabilities=top.values,
    )


def _refuse_nan(probabilities: Tensor, positions: Sequence[int]) -> None:
    """A softmax over NaN, +inf, or nothing but -inf is NaN in the whole row."""
    broken = probabilities[:, 0].isnan()
    if bool(broken.any()):
        position = positions[int(broken.int().argmax())]
        raise CloverError(
            f"the model's logits at response position {position} are no numbers (NaN, infinite, or "
            "every token suppressed): run `clover-local verify` on the model, check --suppress"
        )
