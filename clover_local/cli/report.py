"""`clover-local report`: a trace as one HTML file."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from clover_local.cli import console
from clover_local.cli.options import JsonOpt, QuietOpt, TraceArg
from clover_local.errors import CloverError

if TYPE_CHECKING:
    from clover_local.session import OpenModel

OutArg = Annotated[
    Path, typer.Argument(metavar="OUT.html", help="The file to write.", show_default=False)
]
ModelOpt = Annotated[
    str | None,
    typer.Option(metavar="MODEL", help="Whose tokenizer to use; default: that of the trace."),
]


def report(
    trace: TraceArg,
    out: OutArg,
    model: ModelOpt = None,
    as_json: JsonOpt = False,
    quiet: QuietOpt = False,
) -> None:
    """Show TRACE block by block and pass by pass, as one HTML file that needs no network."""
    from clover_local.traces.page import page, write_page
    from clover_local.traces.read import read_runs

    runs = read_runs(trace)
    opened = _model(model or runs[0].header.model, strict=model is not None)
    if opened is None:
        pieces = page(runs, None)
    else:
        from clover_local.decoding.settings import resolve

        decode = partial(opened.tokenizer.decode, skip_special=False)
        usual = resolve(opened.config, opened.generation, {}).settings
        pieces = page(runs, decode, usual=usual)
    write_page(out, pieces)
    if as_json:
        console.print_json({"file": str(out), "bytes": out.stat().st_size, "runs": len(runs)})
    else:
        console.text(f"wrote {out}")


def _model(name: str, *, strict: bool) -> OpenModel | None:
    """What gives tokens their text; without the model None, with `strict` an error."""
    if not name:
        console.note("note: tokens are shown as ids: pass --model MODEL for their text")
        return None
    from clover_local.session import open_model

    try:
        return open_model(name)
    except CloverError as error:
        if strict:
            raise
        console.note(f"note: tokens are shown as ids: {error}")
        return None
