"""Flags and `/set` keys that change nothing together with others: said, never silently ignored."""

from collections.abc import Collection, Mapping
from types import MappingProxyType

from clover_local.cli import console
from clover_local.decoding.keys import KEYS
from clover_local.decoding.settings import Place, Settings, named
from clover_local.errors import SettingsError

KNOBS_OF = {
    "threshold": "threshold sampler_threshold_decay",
    "factor": "sampler_factor",
    "entropy_bound": "sampler_gamma",
    "margin": "sampler_margin",
    "fixed_steps": "sampler_steps",
    "sequential": "sampler_k",
    "klass": "sampler_kl sampler_history sampler_threshold sampler_threshold_decay",
    "credit": "threshold sampler_alpha sampler_beta sampler_gamma sampler_threshold_decay",
    "hierarchy": "threshold sampler_low sampler_threshold_decay",
}
RULE_KNOBS = " ".join(KNOBS_OF.values())
OF_BLOCKS = "in_block_repetition no_repeat_ngram eos_order"


def without_effect(given: Collection[str], settings: Settings) -> list[tuple[str, str]]:
    """The settings among `given` that do nothing, each with the reason."""
    rule = settings.sampler
    knobs = " ".join(sorted(key for key in KEYS if key.startswith("sampler_")))
    idle = " ".join(sorted({*RULE_KNOBS.split()} - {*KNOBS_OF[rule].split()}))
    running = settings.running_modes
    in_mode = f"in mode {settings.mode}"
    if settings.mode == "auto":
        in_mode += f" of {', '.join(running)}"
    denoise = "denoise" in running
    rules = (
        (not denoise, f"threshold sampler {knobs} {OF_BLOCKS}", in_mode),
        (denoise, idle, f"with sampler {rule}"),
        (
            settings.dry_multiplier == 0,
            "dry_base dry_allowed dry_breakers",
            "while dry_multiplier is 0",
        ),
        (
            "draft" not in running,
            "draft_width accept accept_ratio accept_delta",
            in_mode,
        ),
        (settings.mode != "auto", "auto", in_mode),
        (
            "draft" in running and settings.accept == "exact",
            "accept_ratio accept_delta",
            "while accept is exact",
        ),
        (
            "draft" in running and settings.draft_width == 1,
            "accept accept_ratio accept_delta",
            "with draft_width 1, which drafts nothing",
        ),
        (settings.temperature == 0, "top_k top_p seed", "at temperature 0"),
        (
            settings.length_penalty == 0,
            "length_penalty_start length_penalty_window",
            "while length_penalty is 0",
        ),
        (
            settings.think_end_bias == 0,
            "think_end_start think_end_window",
            "while think_end_bias is 0",
        ),
    )
    return [
        (name, why)
        for holds, names, why in rules
        if holds
        for name in names.split()
        if name in given
    ]


def without_template(
    given: Collection[str], *, bypass: str | None, can_think: bool
) -> list[tuple[str, str]]:
    """As `without_effect`, for flags that only a chat template reads.

    Args:
        bypass: the flag that replaces the template, if there is one.
        can_think: whether the template has a switch for thinking.
    """
    if bypass is not None:
        return [(name, f"with {bypass}") for name in given]
    if "think" in given and not can_think:
        return [("think", "with this model: its chat template has no switch for it")]
    return []


def report(
    findings: Collection[tuple[str, str]],
    *,
    places: Mapping[str, str] = MappingProxyType({}),
    strict: bool,
) -> None:
    """Notes each (key, reason); with `strict` an error instead.

    Args:
        places: where the keys have their values from; what is not among them is a flag.

    Raises:
        SettingsError: `strict`, and there is something to report.
    """
    sentences = [
        f"{named(key, places.get(key, Place.FLAG))} has no effect {why}" for key, why in findings
    ]
    if sentences and strict:
        raise SettingsError(f"{'; '.join(sentences)}: leave it out, or drop --strict")
    for sentence in sentences:
        console.note(f"note: {sentence}")
