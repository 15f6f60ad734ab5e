"""Arguments and flags that several commands share, as types; named as in `/set` and `Settings`."""

from typing import Annotated, TypeAlias

import typer

from clover_local.cli import console
from clover_local.decoding.settings import KEYS

ModelArg: TypeAlias = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="Folder or hub id of a Clover checkpoint, or `demo`.",
        show_default=False,
    ),
]
OptionalModelArg: TypeAlias = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL",
        help="Folder or hub id of a Clover checkpoint; without it the bundled `demo`.",
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

ModeOpt: TypeAlias = Annotated[
    str | None, typer.Option(metavar="denoise|ar", help="Block diffusion, or one token a forward.")
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


def given_settings(call: typer.Context) -> dict[str, object]:
    """The flags of a call that are fields of `Settings`, by name, without those not given."""
    return {key: call.params[key] for key in KEYS if call.params[key] is not None}
