"""Which drafts a verifying forward accepts, and the token that follows them.

`judge` runs in plain PyTorch, wherever the logits are, and takes every control: each row has a
history of its own. Where that does not matter, `device_pick.py` has the numbers of all rows made by
kernels, which share one history, and `judge_numbers` applies the rules to those.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from clover_local.decoding.controls import Controls
from clover_local.decoding.draw import draw_kept, kept_tokens
from clover_local.decoding.pick import ControlledRows, RowStatistics
from clover_local.decoding.random import ACCEPT, BOUNDARY, uniform
from clover_local.decoding.settings import Settings


@dataclass(frozen=True)
class Judged:
    """What became of the drafts of one round."""

    accepted: int
    boundary: int
    """The token behind the accepted drafts."""
    statistics: RowStatistics
    """Of the accepted drafts and the boundary, in host memory."""


def exact(token: Tensor, drafts: Tensor) -> Tensor:
    """[n] bool: drafts that are the `token` which their row would have picked itself."""
    return token == drafts


def typical(probability: Tensor, entropy: Tensor, *, ratio: float, delta: float) -> Tensor:
    """[n] bool: drafts of at least min(ratio, delta * exp(-entropy)), the release's rule.

    Args:
        probability: [n], of each draft.
        entropy: [n], nats, of its row.
    """
    enough = (delta * (-entropy).exp()).clamp(max=ratio)
    return (probability >= enough) & (probability > 0)


@torch.inference_mode()
def judge(
    logits: Tensor, controls: Controls, settings: Settings, *, drafts: Sequence[int], position: int
) -> Judged:
    """Accepts drafts in order until one is refused; the row that refuses gives the boundary.

    Args:
        logits: [w, V] of the pending token and the w - 1 drafts; row j predicts draft j + 1.
        controls: `ResponseControls.along(drafts)`, on the same device.
        settings: how to accept, and how to draw.
        drafts: the proposed tokens.
        position: 1-based response position of the first draft.

    Raises:
        CloverError: logits that are NaN or infinite, or a row in which every token is banned.
        ValueError: not one draft less than rows.
    """
    if len(drafts) != len(logits) - 1:
        raise ValueError(f"{len(drafts)} drafts for {len(logits)} rows, not {len(logits) - 1}")
    positions = range(position, position + len(logits))
    rows = ControlledRows.of(logits.float().clone(), controls, positions)
    if settings.temperature > 0 and settings.accept == "exact":
        accepted, boundary = _sample(rows.logits, settings, drafts=drafts, position=position)
    else:
        accepted = _leading(_accepted(rows, settings, drafts))
        boundary = _boundary(rows.logits[accepted], settings, position=position + accepted)
    tokens = torch.tensor([*drafts[:accepted], boundary], device=logits.device)
    return Judged(accepted, boundary, rows.first(accepted + 1).statistics(tokens).cpu())


def judge_numbers(
    rows: RowStatistics,
    settings: Settings,
    *,
    drafts: Sequence[int],
    probability: Tensor,
    raw_probability: Tensor,
) -> Judged:
    """As `judge` at temperature 0, by numbers instead of logits, all in host memory.

    Args:
        rows: of all w rows; their tokens are the likeliest ones.
        settings: how to accept.
        drafts: the proposed tokens, w - 1.
        probability: [w - 1] float32, of each draft in its row.
        raw_probability: [w - 1], the same before the response controls.
    """
    count, proposed = len(drafts), torch.tensor(drafts, dtype=torch.int64)
    if settings.accept == "exact":
        each = exact(rows.token[:count], proposed)
    else:
        sure = probability
        if settings.has_own_controls:
            sure = torch.minimum(probability, raw_probability)
        each = typical(
            sure,
            rows.entropy[:count],
            ratio=settings.accept_ratio,
            delta=settings.accept_delta,
        )
    accepted = _leading(each)

    def followed(of_drafts: Tensor, of_rows: Tensor) -> Tensor:
        return torch.cat([of_drafts[:accepted], of_rows[accepted : accepted + 1]])

    statistics = RowStatistics(
        token=followed(proposed, rows.token),
        confidence=followed(probability, rows.confidence),
        raw_confidence=followed(raw_probability, rows.raw_confidence),
        entropy=rows.entropy[: accepted + 1],
        top_ids=rows.top_ids[: accepted + 1],
        top_probabilities=rows.top_probabilities[: accepted + 1],
    )
    return Judged(accepted, int(rows.token[accepted]), statistics)


def _accepted(rows: ControlledRows, settings: Settings, drafts: Sequence[int]) -> Tensor:
    """[w - 1] bool, each draft for itself."""
    count = len(drafts)
    proposed = torch.tensor(drafts, dtype=torch.int64, device=rows.logits.device)
    if settings.accept == "exact":
        return exact(rows.logits[:count].argmax(-1), proposed)
    before = rows.first(count)
    probability = before.of_tokens(proposed)
    if settings.has_own_controls and before.raw is not None:
        raw = before.raw.gather(1, proposed[:, None])[:, 0]
        probability = torch.minimum(probability, raw)
    return typical(
        probability,
        before.entropy,
        ratio=settings.accept_ratio,
        delta=settings.accept_delta,
    )


def _leading(accepted: Tensor) -> int:
    """How many are accepted before the first that is not."""
    return int(accepted.long().cumprod(0).sum())


def _boundary(logits: Tensor, settings: Settings, *, position: int) -> int:
    """A row's own token: its argmax, or drawn from [V]."""
    if settings.temperature == 0:
        return int(logits.argmax())
    return draw_kept(*_kept(logits, settings), _uniform(settings, position, BOUNDARY))


def _sample(
    logits: Tensor, settings: Settings, *, drafts: Sequence[int], position: int
) -> tuple[int, int]:
    """(accepted, boundary), so that tokens are distributed as if drawn one after the other.

    A draft is certain to be proposed, so it is accepted with its probability p, and else the token
    is drawn from the rest of p (Leviathan et al., "Fast inference from transformers via speculative
    decoding", 2023, section 2.3).
    """
    for row, draft in enumerate(drafts):
        ids, probabilities = _kept(logits[row], settings)
        is_draft = ids == draft
        share = float((probabilities * is_draft).sum())
        if _uniform(settings, position + row, ACCEPT) >= share:
            rest = probabilities.masked_fill(is_draft, 0)
            return row, draw_kept(ids, rest, _uniform(settings, position + row, BOUNDARY))
    last = len(drafts)
    return last, _boundary(logits[last], settings, position=position + last)


def _kept(logits: Tensor, settings: Settings) -> tuple[Tensor, Tensor]:
    return kept_tokens(
        logits, temperature=settings.temperature, top_k=settings.top_k, top_p=settings.top_p
    )


def _uniform(settings: Settings, position: int, purpose: int) -> float:
    return uniform(settings.seed, position, pass_number=0, purpose=purpose)
