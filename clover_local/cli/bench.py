"""`clover-local bench`: milliseconds of a forward beside the floor of this machine."""

import os
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from clover_local.cli import console
from clover_local.cli.options import JsonOpt, QuietOpt, require_kernels

if TYPE_CHECKING:
    from clover_local.bench.measure import Measured, Report

RepeatsOpt = Annotated[int, typer.Option(min=1, metavar="N", help="Timed runs of each forward.")]
ThreadsOpt = Annotated[
    int | None,
    typer.Option(
        min=1, max=os.cpu_count(), metavar="N", help="CPU threads; default: torch's choice."
    ),
]
ModelOpt = Annotated[
    str | None,
    typer.Argument(
        metavar="[MODEL]",
        help="Folder or hub id, or `demo`; without it random weights in the real layers' shapes "
        "(4 layers, 64 experts; float32 takes 5 GB of memory, int4 1 GB).",
        show_default=False,
    ),
]
WeightsOpt = Annotated[
    Literal["float32", "int4"] | None,
    typer.Option(
        metavar="float32|int4",
        help="Random weights: float32 (default), or INT4 experts with an INT8 trunk.",
    ),
]
AgainstOpt = Annotated[
    Literal["float32", "int4"] | None,
    typer.Option(metavar="float32|int4", help="Random weights to time in turns with the others."),
]


def bench(
    model: ModelOpt = None,
    weights: WeightsOpt = None,
    against: AgainstOpt = None,
    repeats: RepeatsOpt = 7,
    threads: ThreadsOpt = None,
    as_json: JsonOpt = False,
    quiet: QuietOpt = False,
) -> None:
    """Time a pass, a commit, an AR token and a prompt on the CPU beside the floor that it sets."""
    if model is not None and (weights or against):
        raise typer.BadParameter("a MODEL has its own weights", param_hint="--weights / --against")
    require_kernels()
    import torch

    from clover_local import session
    from clover_local.bench.measure import Subject, measure
    from clover_local.bench.models import random_model, real_layers
    from clover_local.decoding.settings import resolve

    if threads is not None:
        torch.set_num_threads(threads)
    if model is None:
        console.note("random weights in the real layers' shapes ...")
        kinds = [weights or "float32", *([against] if against else [])]
        subjects = [Subject(kind, random_model(real_layers(), weights=kind)) for kind in kinds]
    else:
        opened = session.open_model(model)
        settings = resolve(opened.config, opened.generation, {}).settings
        loaded = session.load(opened, settings, device="cpu")
        subjects = [Subject(model, loaded.model)]
    report = measure(subjects, repeats=repeats)
    if as_json:
        console.print_json(report.to_json())
        return
    for measured in report.models:
        _show(measured, report)
    if len(report.models) == 2:
        _compare(*report.models)


def _show(measured: "Measured", report: "Report") -> None:
    rows: list[tuple[object, ...]] = [
        ("forward", "rows", "experts a layer", "ms", "ms a row", "floor ms", "ratio")
    ]
    rows += [
        (
            forward.name,
            forward.rows,
            f"{forward.distinct_experts:.1f}",
            f"{forward.milliseconds:.1f}",
            f"{forward.milliseconds / forward.rows:.2f}",
            f"{forward.floor_milliseconds:.1f}",
            f"{forward.ratio:.2f}",
        )
        for forward in measured.forwards
    ]
    rates = report.rates
    console.show_table(
        f"{measured.name}: {report.threads} threads, reads {rates.bytes_per_second / 1e9:.1f} GB/s,"
        f" multiplies {rates.flops_per_second / 1e9:.0f} GFLOP/s (both measured in this run)",
        rows,
    )
    for line in measured.kernels:
        console.text(f"  {line}", dim=True)


def _compare(first: "Measured", second: "Measured") -> None:
    rows: list[tuple[object, ...]] = [("forward", first.name, second.name, "times faster")]
    rows += [
        (
            a.name,
            f"{a.milliseconds:.1f} ms",
            f"{b.milliseconds:.1f} ms",
            f"{b.milliseconds / a.milliseconds:.2f}",
        )
        for a, b in zip(first.forwards, second.forwards, strict=True)
    ]
    console.show_table(f"{first.name} against {second.name}, in turns", rows)
