"""How fast a plan is likely to be: bytes over bandwidths, launches, and experts that are missing.

    pass = (experts in use + trunk + head + small + state + keys and values) / device bandwidth
         + launches + missing experts / link

The device reads each of these once; nothing is hidden behind anything else. Of the experts in use,
the share that is missing is assumed: with r of all not resident, 0.28 r at a block's first pass or
an AR token and 0.04 r at later passes (7 % and 1 % where three quarters are resident), and no less
than what the slots cannot hold. What text resolves in a pass or a round was measured on another
engine: 1.1 and 3.4 tokens in prose, 2.6 and 10 in code. All of it is prediction, and nothing was
measured on the card.
"""

from dataclasses import dataclass

from clover_local.memory.model_bytes import ModelBytes
from clover_local.memory.parts import OFF_DEVICE, Plan
from clover_local.memory.working_set import (
    ar_experts,
    commit_experts,
    draft_experts,
    preview_experts,
)

FIRST_MISSES = 0.07 / 0.25
LATER_MISSES = 0.01 / 0.25
LAUNCHES_PER_LAYER = 12
SECONDS_PER_LAUNCH = 2.5e-6
"""Inside a CUDA graph."""
STAGED_SLOWDOWN = 2.0
"""A record that is not pinned is copied twice."""
DISK_RATE = 3e9
"""Bytes a second that a drive gives; assumed."""


@dataclass(frozen=True)
class Rates:
    """Bytes a second: of the device's memory, and from pinned host memory to it."""

    device: float = 896e9
    link: float = 52e9


@dataclass(frozen=True)
class Text:
    """How many tokens a preview and a draft's round resolve, of one kind of text."""

    name: str
    tokens_per_preview: float
    tokens_per_round: float


TEXTS = (Text("prose", 1.1, 3.4), Text("code", 2.6, 10.0))


@dataclass(frozen=True)
class Prediction:
    """Milliseconds of the forwards, with the context full, and tokens a second that follow.

    `first` is the pass of a block that finds the experts of the block before it.
    """

    ms_per_ar_token: float
    ms_per_first_preview: float
    ms_per_preview: float
    ms_per_commit: float
    ms_per_draft_round: float
    ar: float
    draft: dict[str, float]
    denoise: dict[str, float]

    def to_json(self) -> dict[str, object]:
        """The object that `plan --json` promises as `predicted`."""
        return {
            "ms_per_preview": round(self.ms_per_preview, 3),
            "ms_per_first_preview": round(self.ms_per_first_preview, 3),
            "ms_per_commit": round(self.ms_per_commit, 3),
            "ms_per_ar_token": round(self.ms_per_ar_token, 3),
            "ms_per_draft_round": round(self.ms_per_draft_round, 3),
            "tokens_per_second": {
                "ar": round(self.ar, 1),
                "draft": {name: round(rate, 1) for name, rate in self.draft.items()},
                "denoise": {name: round(rate, 1) for name, rate in self.denoise.items()},
            },
        }


def predict(plan: Plan, rates: Rates) -> Prediction:
    """The likely speed of a plan that fits.

    Raises:
        ValueError: the plan does not fit, or a rate that is not positive.
    """
    if not plan.fits:
        raise ValueError("a plan that does not fit has no speed")
    if not (rates.device > 0 and rates.link > 0):
        raise ValueError(f"rates are {rates.device} and {rates.link}, both have to be positive")
    config = plan.model.config
    block, later = preview_experts(config), LATER_MISSES
    ar = _seconds(plan, rates, distinct=ar_experts(config), share=FIRST_MISSES)
    first = _seconds(plan, rates, distinct=block, share=FIRST_MISSES)
    preview = _seconds(plan, rates, distinct=block, share=later)
    # What the commit needs beside the block's experts is as new as a first pass's.
    wide = commit_experts(config)
    mixed = (block * later + (wide - block) * FIRST_MISSES) / wide
    commit = _seconds(plan, rates, distinct=wide, share=mixed)
    drafted = draft_experts(config)
    draft = sum(
        _seconds(plan, rates, distinct=drafted, share=share) for share in (FIRST_MISSES, later)
    )
    return Prediction(
        ms_per_ar_token=1000 * ar,
        ms_per_first_preview=1000 * first,
        ms_per_preview=1000 * preview,
        ms_per_commit=1000 * commit,
        ms_per_draft_round=1000 * draft,
        ar=1 / ar,
        draft={text.name: text.tokens_per_round / draft for text in TEXTS},
        denoise={
            text.name: config.block_size
            / (first + max(config.block_size / text.tokens_per_preview - 1, 0) * preview + commit)
            for text in TEXTS
        },
    )


def floor_bytes(model: ModelBytes, *, distinct: float, committed: int) -> float:
    """Bytes that a forward has to read with so many experts of each layer in use."""
    experts = distinct * model.experts / model.config.num_experts
    rest = model.trunk + model.head + model.small + model.state
    return experts + rest + committed * model.token


def _seconds(plan: Plan, rates: Rates, *, distinct: float, share: float) -> float:
    """A forward; `share` of its experts are missing for each that is not resident."""
    model = plan.model
    reading = floor_bytes(model, distinct=distinct, committed=plan.context) / rates.device
    launches = model.config.num_hidden_layers * LAUNCHES_PER_LAYER * SECONDS_PER_LAUNCH
    slots = min(plan.slots_per_layer)
    missing = max(share * (1 - plan.resident_share), 1 - slots / distinct, 0.0)
    fetched = missing * distinct * model.experts / model.config.num_experts
    return reading + launches + fetched * _seconds_per_byte(plan, rates)


def _seconds_per_byte(plan: Plan, rates: Rates) -> float:
    """Of an expert off the device: pinned, through the ring, or from the disk."""
    off_device = plan.host_parts.get(OFF_DEVICE, 0) + plan.staged_bytes
    if not off_device:
        return 1 / rates.link
    disk = plan.disk_bytes / off_device
    staged = plan.staged_bytes / off_device - disk
    return (1 - staged - disk + staged * STAGED_SLOWDOWN) / rates.link + disk / DISK_RATE
