"""`clover-local generate`: one answer."""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from clover_local.cli import console, effects, start
from clover_local.cli import options as o
from clover_local.cli.budget import thinks
from clover_local.cli.heat import colour, legend
from clover_local.cli.interrupt import INTERRUPTED, follow
from clover_local.cli.prompts import messages, parse_ids, read_prompt
from clover_local.cli.status import stats_rows
from clover_local.errors import SettingsError

if TYPE_CHECKING:
    from clover_local.decoding.events import Event
    from clover_local.decoding.result import EmittedToken
    from clover_local.session import Session
    from clover_local.tokenizer import TextStream

RawOpt = Annotated[
    bool, typer.Option("--raw", help="The prompt as it is, without the chat template.")
]
FileOpt = Annotated[
    Path | None,
    typer.Option("--file", "-f", metavar="FILE", help="Read the prompt from FILE; - is stdin."),
]
PromptIdsOpt = Annotated[
    str | None, typer.Option(metavar="IDS", help="The prompt as token ids: 1,2,3.")
]
TraceOpt = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Write what every pass did, as JSON lines.")
]


@o.configured()
@o.takes_settings
@o.takes_memory
def generate(
    call: typer.Context,
    model: o.ModelArg,
    prompt: o.PromptOpt = None,
    file: FileOpt = None,
    prompt_ids: PromptIdsOpt = None,
    raw: RawOpt = False,
    system: o.SystemOpt = None,
    think: o.ThinkOpt = None,
    think_budget: o.ThinkBudgetOpt = None,
    context: o.ContextOpt = None,
    device: o.DeviceOpt = None,
    dtype: o.DtypeOpt = None,
    trace: TraceOpt = None,
    stats: o.StatsOpt = None,
    heat: o.HeatOpt = None,
    as_json: o.JsonOpt = False,
    strict: o.StrictOpt = False,
    quiet: o.QuietOpt = False,
) -> None:
    """Write one answer to a prompt from -p, a file, a pipe, or token ids."""
    given, memory, origins = o.given_settings(call), o.memory_options(call), o.origins(call)
    if heat and (as_json or not console.has_colour(sys.stdout)):
        if "heat" in o.flags_of(call, "heat"):
            why = "with --json" if as_json else "where stdout shows no colours"
            effects.report([("heat", why)], strict=strict)
        heat = False
    thinking = thinks(think, think_budget, origins)
    text, ids = _prompt(prompt, file=file, prompt_ids=prompt_ids, raw=raw)
    template_flags = o.flags_of(call, "system", "think") | ({"raw": raw} if raw and ids else {})
    bypass = "--prompt-ids" if ids else "--raw" if raw else None
    opened, resolved = start.open_model(
        model,
        given,
        origins=origins,
        template_flags=template_flags,
        bypass=bypass,
        think_budget=thinking.budget,
        strict=strict,
    )
    if not raw and not ids:
        text = opened.tokenizer.render(messages(text, system=system), enable_thinking=thinking.on)
    _refuse_same(file, trace)
    with start.trace(opened, trace) as tracing:
        session = start.load(
            opened,
            resolved.settings,
            context=context,
            device=device,
            dtype=dtype,
            memory=memory,
            origins=origins,
            strict=strict,
        )
        session.generator.trace = tracing
        finished = _answer(
            session, ids or opened.tokenizer.encode(text), as_json=as_json, heat=bool(heat)
        )
    _report(session, as_json=as_json, stats=bool(stats))
    if not finished:
        raise typer.Exit(INTERRUPTED)


def _prompt(
    text: str | None, *, file: Path | None, prompt_ids: str | None, raw: bool
) -> tuple[str, list[int] | None]:
    """The text to answer, or the ids that replace it."""
    if prompt_ids is None:
        return read_prompt(text, file=file, keep_newline=raw), None
    if text is not None or file is not None:
        raise typer.BadParameter("--prompt-ids excludes --prompt and --file")
    return "", [*parse_ids(prompt_ids, flag="--prompt-ids")]


def _refuse_same(file: Path | None, trace: Path | None) -> None:
    """A trace in the place of the prompt would cost the prompt."""
    if not (file and trace and file.exists() and trace.exists()):
        return
    if file.samefile(trace):
        raise SettingsError(f"--trace {trace} is the file of the prompt: pass another name")


def _answer(session: Session, ids: list[int], *, as_json: bool, heat: bool) -> bool:
    """Runs; prints text as it is committed, unless JSON follows. False: interrupted."""
    from clover_local.decoding.events import BlockCommitted
    from clover_local.tokenizer import TextStream

    stream = TextStream(session.opened.tokenizer)
    stop_ids = session.generator.settings.stop_ids

    def show(event: Event) -> None:
        if not isinstance(event, BlockCommitted) or as_json:
            return
        if heat:
            emitted = session.generator.emitted[-len(event.tokens) :]
            console.write(_coloured(emitted, stream, stop_ids=stop_ids))
        else:
            console.text(
                stream.push([token for token in event.tokens if token not in stop_ids]), end=""
            )

    finished = follow(session.generator.run(ids), show)
    if not as_json:
        console.text(stream.flush())
    if heat:
        console.hint(legend())
    return finished


def _coloured(
    tokens: Sequence[EmittedToken], stream: TextStream, *, stop_ids: Collection[int]
) -> str:
    """Text in colours by confidence; a character of several tokens has that of the last one."""
    return "".join(
        console.style(
            console.printable(stream.push([each.token])), colour(each.confidence), sys.stdout
        )
        for each in tokens
        if each.token not in stop_ids
    )


def _report(session: Session, *, as_json: bool, stats: bool) -> None:
    """What is known only at the end."""
    result = session.generator.result
    if result is None:
        return  # interrupted before the run had begun
    if as_json:
        text = session.opened.tokenizer.decode(result.text_ids)
        console.print_json(result.to_json(text=text))
    if stats:
        console.show_table("Stats", stats_rows(result), stream=sys.stderr)
