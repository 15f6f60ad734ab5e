"""What may change a rule's choice: a falling threshold, bounds on rows a pass, an early finish."""

from dataclasses import replace

import torch

from clover_local.decoding.pick import Accept, RowStatistics
from clover_local.decoding.rules.margin import best_other
from clover_local.decoding.rules.most_confident import falling, refuse_nan
from clover_local.decoding.settings import Settings

MIN_PER_PASS = "min_per_pass"
FINISH = "finish_gap"
GAPS = ((1 / 3, 7.5), (2 / 3, 5.0), (torch.inf, 2.5))
"""(share of the block that is resolved is below this, the mean gap that finishes it)."""


def decayed(threshold: float, *, decay: float, pass_number: int) -> float:
    """`threshold` less `decay` for each pass made before in the block, at least 0."""
    return max(threshold - decay * pass_number, 0.0) if decay else threshold


def at_least(accepted: Accept, rows: RowStatistics, *, count: int) -> Accept:
    """The accepted rows and the most confident others, `count` in all where there are as many."""
    missing = count - int(accepted.accept.sum())
    if missing <= 0:
        return accepted
    reasons = list(accepted.reasons)
    others = [row for row in falling(rows.confidence).tolist() if not reasons[row]]
    for row in others[:missing]:
        reasons[row] = MIN_PER_PASS
    return _with(reasons)


def at_most(accepted: Accept, rows: RowStatistics, *, count: int) -> Accept:
    """The `count` most confident of the accepted rows."""
    if int(accepted.accept.sum()) <= count:
        return accepted
    reasons = list(accepted.reasons)
    taken = [row for row in falling(rows.confidence).tolist() if reasons[row]]
    for row in taken[count:]:
        reasons[row] = ""
    return _with(reasons)


def finish(accepted: Accept, rows: RowStatistics, *, resolved: float) -> Accept:
    """All rows, where the mean gap of the top two logits is large for the `resolved` share.

    Args:
        resolved: of the block, before this pass.

    Raises:
        ValueError: a probability that is NaN.
    """
    own, other = rows.confidence.double(), best_other(rows).double()
    least = torch.finfo(torch.float32).tiny  # a probability may have rounded to 0
    gaps = own.clamp_min(least).log() - other.clamp_min(least).log()
    refuse_nan(gaps, "gap")
    if gaps.mean() < next(needed for share, needed in GAPS if resolved < share):
        return accepted
    return _with([reason or FINISH for reason in accepted.reasons])


def doubted(rows: RowStatistics, settings: Settings) -> RowStatistics:
    """The rows as a rule sees them: under controls of ours never surer than without the controls.

    Then the confidence is the lesser of the controlled and the raw one; the entropy is at least
    that of a token which has this confidence.
    """
    if not settings.has_own_controls:
        return rows
    confidence = torch.minimum(rows.confidence, rows.raw_confidence)
    entropy: torch.Tensor = torch.special.entr(confidence)
    entropy = entropy + torch.special.entr(1 - confidence)
    entropy = torch.where(
        confidence < rows.confidence, torch.maximum(rows.entropy, entropy), rows.entropy
    )
    return replace(rows, confidence=confidence, entropy=entropy)


def _with(reasons: list[str]) -> Accept:
    return Accept(torch.tensor([bool(reason) for reason in reasons]), tuple(reasons))
