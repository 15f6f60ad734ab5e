"""Arguments and flags that several commands share, as types; named as in `/set` and `Settings`."""

from pathlib import Path
from typing import Annotated, TypeAlias

import typer

from clover_local.cli import console
from clover_local.decoding.settings import KEYS
from clover_local.errors import CloverError, SettingsError
from clover_local.memory.sizes import parse_size
from clover_local.placement import MemoryOptions
from clover_local.residency.names import POLICY_NAMES

CHARTS = (".png", ".svg")

ModelArg: TypeAlias = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="Folder or hub id of a Clover checkpoint, a .gguf file, or `demo`.",
        show_default=False,
    ),
]
OptionalModelArg: TypeAlias = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL",
        help="Folder or hub id of a checkpoint, or a .gguf file; without it the bundled `demo`.",
        show_default=False,
    ),
]
JsonOpt: TypeAlias = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
QuietOpt: TypeAlias = Annotated[
    bool, typer.Option("--quiet", "-q", callback=console.set_quiet, help="No notes, no progress.")
]
StrictOpt: TypeAlias = Annotated[
    bool, typer.Option("--strict", help="Refuse flags that would have no effect.")
]
PromptOpt: TypeAlias = Annotated[
    str | None, typer.Option("--prompt", "-p", metavar="TEXT", help="What to answer.")
]
SystemOpt: TypeAlias = Annotated[str | None, typer.Option(metavar="TEXT", help="System prompt.")]
ThinkOpt: TypeAlias = Annotated[
    bool | None,
    typer.Option(
        "--think/--no-think", help="Think before answering, where the template can switch it."
    ),
]
ContextOpt: TypeAlias = Annotated[
    int | None, typer.Option(min=1, metavar="N", help="Most tokens of prompt and answer together.")
]
DeviceOpt: TypeAlias = Annotated[
    str | None,
    typer.Option(metavar="cpu|cuda", help="Where to run; default: cuda where there is one."),
]
DtypeOpt: TypeAlias = Annotated[
    str | None,
    typer.Option(metavar="float32|bfloat16", help="Default: float32 on cpu, bfloat16 on cuda."),
]

GpuMemoryOpt: TypeAlias = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        help="Most memory to take of the device, such as 15360MiB: of a card, or on cpu of RAM.",
    ),
]
ExpertSlotsOpt: TypeAlias = Annotated[
    int | None,
    typer.Option(metavar="N", help="Experts to keep on the device; default: as many as fit."),
]
PinLimitOpt: TypeAlias = Annotated[
    str | None, typer.Option(metavar="SIZE", help="Most pinned host memory.")
]
PolicyOpt: TypeAlias = Annotated[
    str | None,
    typer.Option(metavar="|".join(POLICY_NAMES), help="Which experts stay on the device."),
]
ExpertProfileOpt: TypeAlias = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Most used experts of earlier runs: they are loaded first."),
]
CpuExpertsOpt: TypeAlias = Annotated[
    str | None,
    typer.Option(metavar="off", help="Compute missing experts on the CPU: not there yet."),
]

ModeOpt: TypeAlias = Annotated[
    str | None,
    typer.Option(
        metavar="denoise|ar|draft",
        help="Block diffusion, one token a forward, or drafts that a forward verifies.",
    ),
]
MaxNewTokensOpt: TypeAlias = Annotated[
    int | None, typer.Option(metavar="N", help="Most tokens of an answer.")
]
ThresholdOpt: TypeAlias = Annotated[
    float | None, typer.Option(metavar="P", help="denoise: a mask is fixed above this confidence.")
]
SamplerOpt: TypeAlias = Annotated[
    str | None, typer.Option(metavar="threshold", help="denoise: the unmasking rule.")
]
DraftWidthOpt: TypeAlias = Annotated[
    int | None, typer.Option(metavar="W", help="draft: rows of a round, 1 to 32.")
]
AcceptOpt: TypeAlias = Annotated[
    str | None,
    typer.Option(metavar="typical|exact", help="draft: which drafts stay; exact writes as ar."),
]
AcceptRatioOpt: TypeAlias = Annotated[
    float | None, typer.Option(metavar="P", help="draft, typical: a probability that is enough.")
]
AcceptDeltaOpt: TypeAlias = Annotated[
    float | None,
    typer.Option(metavar="X", help="draft, typical: so much of exp(-entropy) is enough too."),
]
TemperatureOpt: TypeAlias = Annotated[
    float | None, typer.Option(metavar="T", help="0 picks the likeliest token.")
]
TopKOpt: TypeAlias = Annotated[
    int | None, typer.Option(metavar="K", help="Draw among the K likeliest; 0 = all.")
]
TopPOpt: TypeAlias = Annotated[
    float | None, typer.Option(metavar="P", help="Draw among the likeliest of mass P.")
]
SeedOpt: TypeAlias = Annotated[int | None, typer.Option(metavar="N", help="Seed of every draw.")]
SuppressOpt: TypeAlias = Annotated[
    str | None, typer.Option(metavar="IDS", help="Token ids never to write: 5,17,42.")
]
PresencePenaltyOpt: TypeAlias = Annotated[
    float | None, typer.Option(metavar="X", help="Subtracted from tokens that the answer has.")
]
FrequencyPenaltyOpt: TypeAlias = Annotated[
    float | None, typer.Option(metavar="X", help="Subtracted once per occurrence in the answer.")
]
RepetitionPenaltyOpt: TypeAlias = Annotated[
    float | None,
    typer.Option(metavar="R", help="Divides the logits of tokens that the answer has; 1 = off."),
]
LengthPenaltyOpt: TypeAlias = Annotated[
    float | None, typer.Option(metavar="X", help="Added to the stop tokens as the answer grows.")
]
LengthPenaltyStartOpt: TypeAlias = Annotated[
    int | None, typer.Option(metavar="N", help="Answer length where that begins.")
]
LengthPenaltyWindowOpt: TypeAlias = Annotated[
    int | None, typer.Option(metavar="N", help="Tokens from there to full strength.")
]
ThinkEndBiasOpt: TypeAlias = Annotated[
    float | None,
    typer.Option(metavar="X", help="Added to the end-of-thinking token as the answer grows."),
]
ThinkEndStartOpt: TypeAlias = Annotated[
    int | None, typer.Option(metavar="N", help="Answer length where that begins.")
]
ThinkEndWindowOpt: TypeAlias = Annotated[
    int | None, typer.Option(metavar="N", help="Tokens from there to full strength.")
]


def memory_options(call: typer.Context) -> MemoryOptions:
    """The memory flags of a call.

    Raises:
        SettingsError: a size that is none, or what this version cannot do.
    """
    given = call.params
    if given["cpu_experts"] not in (None, "off"):
        raise SettingsError(
            f"--cpu-experts {given['cpu_experts']}: missing experts are always copied to the "
            "device in this version: leave it out"
        )
    sizes = {
        name: None if given[name] is None else parse_size(given[name], f"--{flag}")
        for name, flag in (("gpu_memory", "gpu-memory"), ("pin_limit", "pin-limit"))
    }
    return MemoryOptions(
        device_bytes=sizes["gpu_memory"],
        expert_slots=given["expert_slots"],
        pin_limit=sizes["pin_limit"],
        policy=given["policy"],
        profile=given["expert_profile"],
    )


def require_plot(path: Path) -> None:
    """Says before any work whether `--plot` can write a chart to `path`.

    Raises:
        CloverError: another kind of file, no regular one, no folder for it, no matplotlib.
    """
    if path.suffix not in CHARTS:
        raise CloverError(f"--plot {path}: a chart is {' or '.join(CHARTS)}, name the file so")
    if not path.parent.is_dir():
        raise CloverError(f"--plot {path}: there is no folder {path.parent}, make it first")
    if path.exists() and not path.is_file():
        raise CloverError(f"--plot {path} is there and no file: pass another name")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise CloverError("--plot needs matplotlib: pip install 'clover-local[plot]'") from None


def given_settings(call: typer.Context) -> dict[str, object]:
    """The flags of a call that are fields of `Settings`, by name, without those not given."""
    return {key: call.params[key] for key in KEYS if call.params[key] is not None}
