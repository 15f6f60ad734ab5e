"""`clover-local bench`: milliseconds of a forward beside the floor of this machine."""

import os
from typing import Annotated

import typer

from clover_local.cli import console
from clover_local.cli.options import JsonOpt, QuietOpt

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
        "(4 layers, 64 experts, 5 GB of memory).",
        show_default=False,
    ),
]


def bench(
    model: ModelOpt = None,
    repeats: RepeatsOpt = 7,
    threads: ThreadsOpt = None,
    as_json: JsonOpt = False,
    quiet: QuietOpt = False,
) -> None:
    """Time a pass, a commit and an AR token on the CPU beside the floor that it sets."""
    import torch

    from clover_local import bench as library
    from clover_local import session
    from clover_local.decoding.settings import resolve

    if threads is not None:
        torch.set_num_threads(threads)
    if model is None:
        console.note("random weights in the real layers' shapes ...")
        subject = library.random_model(library.real_layers())
    else:
        opened = session.open_model(model)
        settings = resolve(opened.config, opened.generation, {}).settings
        subject = session.load(opened, settings, device="cpu").model
    report = library.measure(subject, repeats=repeats)
    if as_json:
        console.print_json(report.to_json())
        return
    rates = report.rates
    rows: list[tuple[object, ...]] = [
        ("forward", "rows", "experts a layer", "ms", "floor ms", "ratio")
    ]
    rows += [
        (
            forward.name,
            forward.rows,
            f"{forward.distinct_experts:.1f}",
            f"{forward.milliseconds:.1f}",
            f"{forward.floor_milliseconds:.1f}",
            f"{forward.ratio:.2f}",
        )
        for forward in report.forwards
    ]
    console.show_table(
        f"{report.threads} threads, reads {rates.bytes_per_second / 1e9:.1f} GB/s, multiplies "
        f"{rates.flops_per_second / 1e9:.0f} GFLOP/s (both measured in this run)",
        rows,
    )
