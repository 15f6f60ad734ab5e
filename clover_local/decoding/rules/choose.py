"""From a pass's statistics to the rows that it fixes: the rule of the settings, then modifiers."""

from collections.abc import Sequence

from clover_local.decoding.pick import Accept, RowStatistics
from clover_local.decoding.rules import modifiers
from clover_local.decoding.rules.entropy_bound import entropy_bound
from clover_local.decoding.rules.factor import factor
from clover_local.decoding.rules.fixed_steps import fixed_steps
from clover_local.decoding.rules.hierarchy import hierarchy
from clover_local.decoding.rules.klass import klass
from clover_local.decoding.rules.margin import margin
from clover_local.decoding.rules.sequential import sequential
from clover_local.decoding.rules.threshold import threshold
from clover_local.decoding.settings import Settings


def choose(
    rows: RowStatistics,
    settings: Settings,
    *,
    places: Sequence[int],
    block_size: int,
    pass_number: int,
) -> Accept:
    """Which masked rows the settings' rule accepts.

    Args:
        rows: statistics of the masked rows, in host memory, at least one.
        settings: the rule, its knobs and the modifiers.
        places: the rows' places in the block, ascending.
        block_size: rows of the block, masked or not.
        pass_number: pass in the block, from 0.
    """
    rows = modifiers.doubted(rows, settings)
    accepted = _by_rule(rows, settings, places=places, pass_number=pass_number)
    if settings.sampler_min_per_pass:
        accepted = modifiers.at_least(accepted, rows, count=settings.sampler_min_per_pass)
    if settings.sampler_max_per_pass:
        accepted = modifiers.at_most(accepted, rows, count=settings.sampler_max_per_pass)
    if settings.sampler_finish_gap:
        resolved = 1 - len(places) / block_size
        accepted = modifiers.finish(accepted, rows, resolved=resolved)
    return accepted


def _by_rule(
    rows: RowStatistics, settings: Settings, *, places: Sequence[int], pass_number: int
) -> Accept:
    s = settings

    def decayed(value: float) -> float:
        return modifiers.decayed(value, decay=s.sampler_threshold_decay, pass_number=pass_number)

    match s.sampler:
        case "threshold" | "credit":  # the credit is in the statistics by now
            return threshold(rows, threshold=decayed(s.threshold))
        case "factor":
            return factor(rows, factor=s.sampler_factor)
        case "entropy_bound":
            return entropy_bound(rows, gamma=s.gamma)
        case "margin":
            return margin(rows, margin=s.sampler_margin)
        case "fixed_steps":
            return fixed_steps(rows, steps_left=s.sampler_steps - pass_number)
        case "sequential":
            return sequential(rows, k=s.sampler_k)
        case "klass":
            return klass(rows, threshold=decayed(s.sampler_threshold), history=s.sampler_history)
        case "hierarchy":
            return hierarchy(rows, places=places, low=s.sampler_low, threshold=decayed(s.threshold))
    raise ValueError(f"the sampler {s.sampler!r} is none of the rules")
