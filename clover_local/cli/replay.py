"""`clover-local replay`: a recorded run again, and the first pass that differs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from clover_local.cli import console, start
from clover_local.cli import options as o
from clover_local.errors import SettingsError, TraceError

if TYPE_CHECKING:
    from clover_local.session import OpenModel
    from clover_local.traces.read import Header, Step
    from clover_local.traces.replay import Difference, Replay

ModelOpt = Annotated[
    str | None,
    typer.Option(metavar="MODEL", help="Run it on this model; default: the one it was made with."),
]
StrictOpt = Annotated[
    bool,
    typer.Option(
        "--strict/--no-strict", help="Refuse another model, device or dtype than recorded."
    ),
]


@o.configured("device", "strict", *o.MEMORY)
@o.takes_memory
def replay(
    call: typer.Context,
    trace: o.TraceArg,
    model: ModelOpt = None,
    device: o.DeviceOpt = None,
    dtype: o.DtypeOpt = None,
    as_json: o.JsonOpt = False,
    strict: StrictOpt = False,
    quiet: o.QuietOpt = False,
) -> None:
    """Run TRACE again from its header and name the first pass that differs; code 0: none does."""
    from clover_local.traces.read import read_runs
    from clover_local.traces.settings import recorded_settings

    memory = o.memory_options(call)
    runs = read_runs(trace)
    header = runs[0].header
    name = model or header.model
    if not name:
        raise TraceError(f"{trace} does not say which model it is of: pass --model MODEL")
    opened, resolved = start.open_model(name, {}, template_flags={}, strict=strict)
    _compare_model(opened, header, strict=strict)
    settings = [recorded_settings(run.header, resolved) for run in runs]
    session = start.load(
        opened,
        settings[0],
        context=max(run.header.context for run in runs),
        device=device,
        dtype=dtype or (header.dtype if device is None else None),
        memory=memory,
        origins=o.origins(call),
        strict=strict,
    )
    where = f"{session.device} in {session.dtype}"
    recorded = f"{header.device.partition(':')[0]} in {header.dtype or session.dtype}"
    if where != recorded:
        _say(f"the trace was made on {recorded}, it is replayed on {where}", strict=strict)
    from clover_local.traces.replay import replay as run_again

    outcome = run_again(runs, session.generator, settings)
    _report(outcome, runs=len(runs), as_json=as_json)
    if outcome.difference is not None:
        raise typer.Exit(1)


def _compare_model(opened: OpenModel, header: Header, *, strict: bool) -> None:
    from clover_local.session import fingerprint

    own = fingerprint(opened)
    if own != header.model_hash:
        _say(
            f"the trace was made with another model (hash {header.model_hash[:12]}, "
            f"{opened.name} has {own[:12]})",
            strict=strict,
        )


def _say(sentence: str, *, strict: bool) -> None:
    if strict:
        raise SettingsError(f"{sentence}: pass what was recorded, or drop --strict")
    console.note(f"note: {sentence}")


def _report(outcome: Replay, *, runs: int, as_json: bool) -> None:
    found = outcome.difference
    if as_json:
        console.print_json(
            {
                "equal": found is None,
                "runs": runs,
                "passes": outcome.passes,
                "difference": None if found is None else _json(found),
            }
        )
    elif found is None:
        console.text(f"equal: {outcome.passes} passes of {runs} runs")
    else:
        console.text(f"differs in {found.sentence()}")


def _json(found: Difference) -> dict[str, object]:
    here = found.recorded or found.replayed
    return {
        "run": found.run,
        "index": found.index,
        "block": None if here is None else here.block,
        "pass": None if here is None else here.number,
        "rows": list(found.rows),
        "recorded": _side(found.recorded),
        "replayed": _side(found.replayed),
    }


def _side(step: Step | None) -> list[list[int]] | None:
    return None if step is None else [[row.row, row.token] for row in step.picked]
