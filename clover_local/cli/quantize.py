"""`clover-local quantize`: an INT4 checkpoint of a model, made within a memory limit."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from clover_local.cli import console, effects
from clover_local.cli.interrupt import INTERRUPTED, single_interrupt
from clover_local.cli.options import DeviceOpt, JsonOpt, ModelArg, QuietOpt, StrictOpt, configured
from clover_local.cli.status import size
from clover_local.memory.sizes import parse_bytes
from clover_local.quant.profiles import Choices

if TYPE_CHECKING:
    from clover_local.quant.pipeline.run import Listener, Outcome
    from clover_local.quant.pipeline.source import ForeignSource, GgufSource, PlainSource
    from clover_local.quant.report import LayerReport

DestinationArg = Annotated[
    Path, typer.Argument(metavar="DEST", help="Folder for the result.", show_default=False)
]
ProfileOpt = Annotated[
    str, typer.Option(metavar="balanced|quality", help="Which formats the parts get.")
]
MethodOpt = Annotated[
    str, typer.Option(metavar="gptq|rtn|nf4", help="How experts are rounded; nf4 is a baseline.")
]
GroupSizeOpt = Annotated[
    int | None,
    typer.Option(
        metavar="N", help="Inputs of an expert under one scale; default: the profile's, 128 or 32."
    ),
]
TrunkBitsOpt = Annotated[
    int, typer.Option(metavar="8|16", help="Bits outside the experts; 16: as in the source.")
]
CalibrationOpt = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Text to calibrate on; default: the bundled texts."),
]
CalibrationTokensOpt = Annotated[
    int, typer.Option(metavar="N", help="Tokens of it, as far as there are so many.")
]
PreviewWeightOpt = Annotated[
    float, typer.Option(metavar="W", help="What a preview's row counts for; a commit's row is 1.")
]
MinTokensOpt = Annotated[
    int, typer.Option(metavar="N", help="Experts that saw fewer rows are listed.")
]
DampOpt = Annotated[
    float, typer.Option(metavar="X", help="gptq: share of the mean diagonal added to it.")
]
EvaluationTokensOpt = Annotated[
    int,
    typer.Option(metavar="N", help="Tokens of held-out text to compare on; 0: no comparison."),
]
MemoryOpt = Annotated[
    str, typer.Option(metavar="SIZE", help="Most memory to use, such as 800MiB or 12GiB.")
]
SeedOpt = Annotated[int, typer.Option(metavar="N", help="Seed of the choice of text and masks.")]

_OF_QUANTIZING = (*(field.name for field in fields(Choices)), "calibration", "device")
"""Parameters that an import has no use for."""


@configured("device", "strict")
def quantize(
    call: typer.Context,
    source: ModelArg,
    destination: DestinationArg,
    profile: ProfileOpt = Choices.profile,
    method: MethodOpt = Choices.method,
    group_size: GroupSizeOpt = Choices.group_size,
    trunk_bits: TrunkBitsOpt = Choices.trunk_bits,
    calibration: CalibrationOpt = None,
    calibration_tokens: CalibrationTokensOpt = Choices.calibration_tokens,
    preview_weight: PreviewWeightOpt = Choices.preview_weight,
    min_tokens: MinTokensOpt = Choices.min_tokens,
    damp: DampOpt = Choices.damp,
    evaluation_tokens: EvaluationTokensOpt = Choices.evaluation_tokens,
    memory: MemoryOpt = "12GiB",
    device: DeviceOpt = None,
    seed: SeedOpt = Choices.seed,
    as_json: JsonOpt = False,
    strict: StrictOpt = False,
    quiet: QuietOpt = False,
) -> None:
    """Quantize MODEL to INT4 in the folder DEST; the same command continues after a stop."""
    from clover_local.quant.pipeline.source import ForeignSource, GgufSource, open_source
    from clover_local.session import check_device

    started = time.monotonic()
    limit = parse_bytes(memory, "--memory")
    place = check_device(device)
    choices = Choices(
        profile=profile,
        method=method,
        group_size=group_size,
        trunk_bits=trunk_bits,
        calibration_tokens=calibration_tokens,
        preview_weight=preview_weight,
        min_tokens=min_tokens,
        damp=damp,
        seed=seed,
        evaluation_tokens=evaluation_tokens,
    )
    opened = open_source(source)
    for note in opened.notes:
        console.note(f"note: {note}")
    request = _Request(destination, choices, place.type, calibration, limit, _given(call), strict)
    with _listening(opened.config.num_hidden_layers) as listener:
        if isinstance(opened, ForeignSource | GgufSource):
            outcome = _import(opened, request, listener)
        else:
            outcome = _quantize(opened, request, listener)
    if as_json:
        console.print_json(outcome.report)
    else:
        _show(outcome)
    if not outcome.was_finished:
        _close(outcome, seconds=time.monotonic() - started)


@dataclass(frozen=True)
class _Request:
    """What the command line asks for."""

    destination: Path
    choices: Choices
    device: str
    calibration: Path | None
    memory: int
    given: Sequence[str]  # the flags that were really there
    strict: bool


def _quantize(source: PlainSource, request: _Request, listener: Listener) -> Outcome:
    from clover_local.quant.pipeline import run
    from clover_local.quant.profiles import resolve, without_effect

    recipe, notes = resolve(request.choices, source.config, device=request.device)
    idle = without_effect(request.given, recipe, has_diffusion=source.has_diffusion)
    effects.report(idle, strict=request.strict)
    for note in notes:
        console.note(f"note: {note}")
    return run.quantize(
        source,
        request.destination,
        recipe=recipe,
        calibration=request.calibration,
        memory=request.memory,
        notes=notes,
        listener=listener,
    )


def _import(source: ForeignSource | GgufSource, request: _Request, listener: Listener) -> Outcome:
    from clover_local.quant.pipeline import run

    console.note(f"note: weights quantized by {source.method} are imported as they are")
    idle = [(name, "on an import") for name in request.given if name in _OF_QUANTIZING]
    effects.report(idle, strict=request.strict)
    return run.import_quantized(
        source, request.destination, memory=request.memory, listener=listener
    )


def _given(call: typer.Context) -> list[str]:
    """The parameters that the command line really has."""
    sources = {name: call.get_parameter_source(name) for name in call.params}
    return [name for name, source in sources.items() if source and source.name == "COMMANDLINE"]


class _Display:
    """Shows how a run goes on: a progress line for each stage, or a line for each layer."""

    def __init__(self, layers: int) -> None:
        self.layers = layers
        self._stage = ""
        self._open = ExitStack()
        self._report: Callable[[int, int], None] = lambda done, total: None

    def on_stage(self, stage: str, done: int, total: int) -> None:
        """See `Listener.on_stage`."""
        if stage != self._stage:
            self.close()
            self._stage, self._report = stage, self._open.enter_context(console.progress(stage))
        self._report(done, total)

    def on_layer(self, layer: LayerReport) -> None:
        """See `Listener.on_layer`."""
        from clover_local.quant.report import layer_line

        if not console.is_terminal(sys.stderr):
            console.note(layer_line(layer, layers=self.layers))

    def close(self) -> None:
        """Takes the progress line away."""
        self._open.close()


@contextmanager
def _listening(layers: int) -> Iterator[Listener]:
    """Shows how a run goes on; Ctrl-C ends it with a line that says how to continue."""
    from clover_local.quant.pipeline.run import Listener

    display = _Display(layers)
    with single_interrupt(), closing(display):
        try:
            yield Listener(display.on_stage, display.on_layer)
        except KeyboardInterrupt:
            display.close()
            console.note("stopped: the same command continues")
            raise typer.Exit(INTERRUPTED) from None


def _show(outcome: Outcome) -> None:
    """The report as tables."""
    from clover_local.quant.report import table

    values = outcome.report
    if outcome.was_finished:
        console.text(f"{outcome.folder} is finished already: nothing to do")
    console.show_table(
        "Experts: relative output error, median over a layer (of gptq: from its corrected target)",
        table(values),
    )
    sizes = values["size"]
    rows: list[tuple[object, ...]] = [
        ("bits per weight", f"{sizes['bits_per_weight']:.2f}"),
        ("size", f"{size(sizes['bytes'])}, source {size(sizes['source_bytes'])}"),
    ]
    if sizes["int4_ratio"] is not None:
        rows.append(("INT4 tensors to their BF16", f"{sizes['int4_ratio']:.3f}"))
    if values["evaluation"]:
        rows += _comparison_rows(values["evaluation"])
    console.show_table("Model", rows)


def _comparison_rows(evaluation: Mapping[str, Any]) -> Iterator[tuple[object, ...]]:
    yield "KL in nats, causal rows", f"{evaluation['kl_causal']:.5f}"
    for ratio, kl in evaluation["kl_masked"].items():
        if kl is not None:
            yield f"KL in nats, masked rows at ratio {ratio}", f"{kl:.5f}"
    if evaluation["kl_masked_mean"] is not None:
        yield "KL in nats, all masked rows", f"{evaluation['kl_masked_mean']:.5f}"
    flips = evaluation["accepted_flip_rate"]
    if flips is not None:
        yield "flips among accepted rows", f"{100 * flips:.2f} %"
    after = evaluation["tokens_per_preview"]
    before = (evaluation["reference"] or {}).get("tokens_per_preview")
    if after is not None and before is not None:
        yield "tokens per preview", f"{after:.2f}, source {before:.2f}"


def _close(outcome: Outcome, *, seconds: float) -> None:
    """What is worth saying besides the report, and what the run cost."""
    from clover_local.quant.memory import peak_resident

    few = outcome.report["experts_under_min_tokens"]
    if few:
        console.note(
            f"note: {few} experts saw fewer rows than --min-tokens: the report lists them; "
            "more --calibration-tokens, or a text of more kinds, reaches more"
        )
    peak = peak_resident()
    memory = "" if peak is None else f" · {size(peak)} of memory at most"
    console.note(f"made {outcome.folder} in {seconds:.0f} s{memory}")
