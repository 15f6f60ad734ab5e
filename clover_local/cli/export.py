"""`clover-local export`: a model for other programs."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from clover_local.cli import console
from clover_local.cli.options import JsonOpt, ModelArg, QuietOpt
from clover_local.cli.status import size
from clover_local.errors import SettingsError
from clover_local.gguf.types import ARCHITECTURES

if TYPE_CHECKING:
    from clover_local.gguf.export.run import Exported
    from clover_local.gguf.export.source import Source

OutArg = Annotated[
    Path, typer.Argument(metavar="OUT", help="The .gguf file to write.", show_default=False)
]
TypeOpt = Annotated[
    str | None,
    typer.Option(
        "--type",
        metavar="F32|F16|BF16|Q8_0|Q6_K|Q5_K_M|Q4_K_M|Q4_0|IQ4_XS|Q3_K_M",
        help="Of the matrices; default: Q4_K_M.",
    ),
]
PresetOpt = Annotated[
    str | None,
    typer.Option(metavar="clover-q4", help="Q4_K_M with all but experts and embedding at Q8_0."),
]
ArchOpt = Annotated[
    str, typer.Option(metavar="|".join(ARCHITECTURES), help="The architecture to name.")
]
DiffusionOpt = Annotated[
    str,
    typer.Option(
        metavar="embed|sidecar|none", help="Where the diffusion parameters go: in OUT, beside it."
    ),
]
ImatrixOpt = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="An importance matrix, from `clover-local imatrix`."),
]
JobsOpt = Annotated[
    int | None, typer.Option(min=1, metavar="N", help="Threads; default: one for each core.")
]

app = typer.Typer(help="Write a model in the format of other programs.", rich_markup_mode=None)


@app.command()
def gguf(
    model: ModelArg,
    out: OutArg,
    type_: TypeOpt = None,
    preset: PresetOpt = None,
    arch: ArchOpt = ARCHITECTURES[0],
    diffusion: DiffusionOpt = "embed",
    imatrix: ImatrixOpt = None,
    jobs: JobsOpt = None,
    as_json: JsonOpt = False,
    quiet: QuietOpt = False,
) -> None:
    """Write MODEL as a GGUF file for llama.cpp; the same command continues after a stop."""
    from clover_local.gguf.export.mixtures import mixture
    from clover_local.gguf.export.run import DIFFUSION

    mix = mixture(type_, preset, has_imatrix=imatrix is not None)
    _require_one_of("--arch", arch, ARCHITECTURES)
    _require_one_of("--diffusion", diffusion, DIFFUSION)
    started = time.monotonic()
    source = _open(model)
    tensors = source.checkpoint.tensors.values()
    if any(not tensor.dtype.startswith(("F", "BF")) for tensor in tensors):
        console.note(
            "note: this model is quantized already: what was rounded once is rounded again"
        )

    from clover_local.gguf.export.run import export_gguf, make_plan
    from clover_local.gguf.imatrix import read_imatrix

    sums = None if imatrix is None else read_imatrix(imatrix)
    plan = make_plan(source, mix, architecture=arch, diffusion=diffusion, imatrix=sums)
    if arch != ARCHITECTURES[0]:
        console.note(f"note: no llama.cpp has loaded a file of the architecture {arch} yet")
    with console.progress(f"writing {out}") as on_progress:
        exported = export_gguf(
            source,
            out,
            plan,
            diffusion=diffusion,
            jobs=jobs or os.cpu_count() or 1,
            on_progress=on_progress,
        )
    _show(exported, as_json=as_json, seconds=time.monotonic() - started)


@app.command()
def diffusion(
    model: ModelArg, out: OutArg, as_json: JsonOpt = False, quiet: QuietOpt = False
) -> None:
    """Write the diffusion parameters alone: beside a GGUF file they make it a diffusion model."""
    from clover_local.gguf.export.run import export_diffusion

    path = export_diffusion(_open(model), out)
    nbytes = path.stat().st_size
    if as_json:
        console.print_json({"file": str(path), "bytes": nbytes})
    else:
        console.text(f"{path}: {size(nbytes)}")


def _open(model: str) -> Source:
    from clover_local.gguf.export.source import Source
    from clover_local.session import open_model

    opened = open_model(model)
    checkpoint = opened.checkpoint
    for note in checkpoint.notes:
        console.note(f"note: {note}")
    name = opened.folder.resolve().name.removesuffix(".gguf")
    return Source(name, checkpoint, opened.config, opened.generation, opened.tokenizer)


def _require_one_of(flag: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise SettingsError(f"{flag} {value} is unknown: use {' or '.join(choices)}")


def _show(exported: Exported, *, as_json: bool, seconds: float) -> None:
    if as_json:
        sidecar = None if exported.sidecar is None else str(exported.sidecar)
        console.print_json(
            {"file": str(exported.path), "bytes": exported.nbytes, "sidecar": sidecar}
        )
        return
    if exported.was_finished:
        console.text(f"{exported.path} is finished already: nothing to do")
        return
    console.text(f"{exported.path}: {size(exported.nbytes)}")
    if exported.sidecar is not None:
        console.text(f"{exported.sidecar}: the diffusion parameters")
    console.note(f"{seconds:.0f} s")
