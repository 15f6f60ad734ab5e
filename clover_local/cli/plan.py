"""`clover-local plan`: what of a model fits where, how fast it is likely to be, or what is missing.

Reads a config, and headers where there are weights; needs neither weights nor torch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer

from clover_local.checkpoint.placements import open_checkpoint, require_readable
from clover_local.checkpoint.summary import Summary, read_summary, summarize
from clover_local.cli import console
from clover_local.cli.options import JsonOpt, ModelArg, PinLimitOpt, QuietOpt
from clover_local.cli.plan_tables import percent, show
from clover_local.cli.plan_target import Target, find_target
from clover_local.config import ModelConfig, read_model_config
from clover_local.errors import ConfigError, SettingsError
from clover_local.hub import DESCRIPTION_FILES, locate
from clover_local.memory.model_bytes import (
    Formats,
    ModelBytes,
    StorageFormat,
    from_config,
    from_summary,
)
from clover_local.memory.parts import Budget, Plan
from clover_local.memory.planner import plan as make_plan
from clover_local.memory.predict import predict
from clover_local.memory.sizes import parse_size
from clover_local.placement import PLANNED_CONTEXT, check_context
from clover_local.quant.profiles import (
    AS_SOURCE,
    PROFILES,
    TRUNK_GROUP_SIZES,
    Choices,
    resolve,
)

GpuOpt = Annotated[
    str | None,
    typer.Option(
        metavar="16GB",
        help="A card's nominal memory; default: this machine's, else a 16 GB card.",
    ),
]
GpuMemoryOpt = Annotated[
    str | None, typer.Option(metavar="SIZE", help="Most of it to use, such as 15360MiB.")
]
RamOpt = Annotated[
    str | None,
    typer.Option(metavar="32GB", help="Installed memory; default: what is free here, or 32GB."),
]
LinkOpt = Annotated[
    str | None, typer.Option(metavar="52GB/s", help="Rate from pinned memory to the card.")
]
BandwidthOpt = Annotated[
    str | None, typer.Option(metavar="896GB/s", help="Rate of the card's memory.")
]
PlanContextOpt = Annotated[
    int | None, typer.Option(min=1, metavar="N", help="Tokens of prompt and answer; default 32768.")
]
PlanProfileOpt = Annotated[
    str | None,
    typer.Option(
        metavar="balanced|quality|bf16",
        help="Plan unquantized weights as this profile of `quantize` makes them.",
    ),
]

BF16 = "bf16"
CONTEXTS = (4096, 8192, 16384, 32768, 65536, 131072)


@dataclass(frozen=True)
class Source:
    """A model's bytes, and what they are: formats in words."""

    model: ModelBytes
    formats: str


def plan(
    model: ModelArg,
    gpu: GpuOpt = None,
    gpu_memory: GpuMemoryOpt = None,
    ram: RamOpt = None,
    pin_limit: PinLimitOpt = None,
    link: LinkOpt = None,
    bandwidth: BandwidthOpt = None,
    context: PlanContextOpt = None,
    profile: PlanProfileOpt = None,
    as_json: JsonOpt = False,
    quiet: QuietOpt = False,
) -> None:
    """Show what of MODEL fits on a card, and the speed to expect; needs no weights."""
    target = find_target(gpu=gpu, gpu_memory=gpu_memory, ram=ram, link=link, bandwidth=bandwidth)
    folder = locate(model, files=DESCRIPTION_FILES)
    if folder.is_file():
        config, source = _gguf_source(folder, profile)
    else:
        config = read_model_config(folder)
        source = _source(folder, config, profile)
    most = config.max_position_embeddings
    if context is not None:
        check_context(context, config)
    budget = Budget(
        device=target.device,
        host=target.host,
        context=context or min(PLANNED_CONTEXT, most),
        pin_limit=None if pin_limit is None else parse_size(pin_limit, "--pin-limit"),
    )
    made = make_plan(source.model, budget)
    made = replace(made, advice=(*made.advice, *_smaller(config, source, made)))
    others = [
        make_plan(source.model, replace(budget, context=length))
        for length in CONTEXTS
        if length <= most
    ] or [made]
    if as_json:
        console.print_json(_json(made, others, target, source))
    elif made.fits:
        show(model, made, others, target, source.formats)
    made.require_fit()
    for line in () if as_json else made.advice:
        console.note(f"note: {line}")


def _gguf_source(path: Path, profile: str | None) -> tuple[ModelConfig, Source]:
    """The model in a .gguf file, as it runs on a card."""
    from clover_local.gguf.load import opened  # late: `--help` need not wait for numpy

    if profile is not None:
        raise SettingsError(f"--profile {profile} is for checkpoints in folders: leave it out")
    config, _, checkpoint = opened.match(*opened.read_files(path))
    checkpoint.require_fit()
    summary = summarize(checkpoint, device="cuda")
    return config, Source(from_summary(config, summary), _labels(summary))


def _source(folder: Path, config: ModelConfig, profile: str | None) -> Source:
    """The model as it is on disk, or as `profile` makes it of unquantized weights."""
    summary = _summary(folder, config)
    is_packed = summary is not None and any(group.group_size for group in summary.groups)
    if summary is not None and is_packed and profile is not None:
        raise SettingsError(
            f"--profile {profile} is for unquantized models, {folder} is quantized: leave it out"
        )
    if summary is not None and (is_packed or profile is None):
        try:
            counted = from_summary(config, summary)
        except ValueError as error:
            raise ConfigError(f"{folder}: the summary is of another model ({error})") from None
        return Source(counted, _labels(summary))
    chosen = profile or Choices.profile
    formats = _formats(chosen, config)
    has_diffusion = summary is None or bool(summary.diffusion)
    return Source(
        from_config(config, formats, diffusion=has_diffusion), f"{_words(formats)}, {chosen}"
    )


def _summary(folder: Path, config: ModelConfig) -> Summary | None:
    """What the files hold; None where there are no weights and no summary."""
    summary = read_summary(folder)
    has_weights = any(folder.glob("*.safetensors"))
    if has_weights and (summary is None or not summary.describes(folder)):
        checkpoint = open_checkpoint(folder, config)
        checkpoint.require_fit()
        return summarize(checkpoint)
    if has_weights:
        require_readable(folder, config)
    return summary


def _formats(profile: str, config: ModelConfig) -> Formats:
    """The formats that `quantize --profile` gives; of mixtures the largest.

    Raises:
        SettingsError: an unknown profile, or groups that do not divide the experts.
    """
    plain = StorageFormat(AS_SOURCE)
    if profile == BF16:
        return Formats(plain, plain)
    if profile not in PROFILES:
        known = ", ".join(PROFILES)
        raise SettingsError(f"--profile {profile} is unknown: use {known} or {BF16}")
    recipe, _ = resolve(Choices(profile=profile), config, device="cpu")
    trunk = tuple(StorageFormat(recipe.trunk_bits, size) for size in TRUNK_GROUP_SIZES)
    experts = StorageFormat(4, recipe.group_size)
    # Which layers get wider down projections is known after quantizing: all, at most.
    down = experts if recipe.down_error_limit is None else replace(experts, bits=8)
    return Formats(experts, down, trunk, trunk if recipe.head_bits < AS_SOURCE else ())


def _smaller(config: ModelConfig, source: Source, made: Plan) -> list[str]:
    """What the default profile would do for a model that does not fit, or not whole."""
    try:
        smaller = from_config(config, _formats(Choices.profile, config))
    except SettingsError:
        return []  # its experts cannot be quantized
    other = make_plan(smaller, made.budget)
    if smaller.experts >= source.model.experts or not other.fits or made.resident_share == 1:
        return []
    remedy = f"quantize it with --profile {Choices.profile}"
    return [f"{remedy}: {percent(other.resident_share)} resident" if made.fits else remedy]


def _labels(summary: Summary) -> str:
    """The largest format of experts, trunk and head in a checkpoint."""
    parts = (("experts", summary.experts), ("trunk", summary.trunk), ("head", summary.head))
    return ", ".join(f"{name} {groups[0].label}" for name, groups in parts if groups)


def _words(formats: Formats) -> str:
    def word(matrix: StorageFormat) -> str:
        return f"INT{matrix.bits} g{matrix.group_size}" if matrix.group_size else "BF16"

    plain = StorageFormat(AS_SOURCE)
    down = "" if formats.down == formats.gate_up else f" (down {word(formats.down)} at most)"
    trunk, head = (word((*choices, plain)[0]) for choices in (formats.trunk, formats.head))
    return f"experts {word(formats.gate_up)}{down}, trunk {trunk}, head {head}"


def _json(made: Plan, others: Sequence[Plan], target: Target, source: Source) -> dict[str, object]:
    def predicted(each: Plan) -> dict[str, object] | None:
        return predict(each, target.rates).to_json() if each.fits else None

    return {
        **made.to_json(),
        "problem": made.problem,
        "predicted": predicted(made),
        "formats": source.formats,
        "machine": {
            "name": target.name,
            "device_bytes": target.device,
            "host_bytes": target.host,
            "bandwidth": target.rates.device,
            "link": target.rates.link,
            "assumed": list(target.assumed),
        },
        "contexts": [
            {
                "context": each.context,
                "fits": each.fits,
                "resident_share": round(each.resident_share, 4),
                "slots": each.slots,
                "predicted": predicted(each),
            }
            for each in others
        ],
    }
