"""The program `clover-local`: its commands, and what an error becomes on the way out."""

import io
import os
import sys

import typer

from clover_local.cli import console, failures
from clover_local.cli.bench import bench
from clover_local.cli.cached import ls, rm
from clover_local.cli.chat import chat
from clover_local.cli.completion import completion
from clover_local.cli.config import app as config
from clover_local.cli.doctor import doctor
from clover_local.cli.evaluate import evaluate
from clover_local.cli.export import app as export
from clover_local.cli.generate import generate
from clover_local.cli.imatrix import imatrix
from clover_local.cli.info import info
from clover_local.cli.interrupt import INTERRUPTED
from clover_local.cli.plan import plan
from clover_local.cli.pull import pull
from clover_local.cli.quantize import quantize
from clover_local.cli.replay import replay
from clover_local.cli.report import report
from clover_local.cli.simulate import simulate
from clover_local.cli.verify import verify

FAILED = 1
USAGE = 2

app = typer.Typer(
    name="clover-local",
    help="Runs Clover, a block-diffusion mixture-of-experts language model, on this machine.",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    add_completion=False,  # `completion` prints scripts that need no Python
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(chat)
app.command()(generate)
app.command()(info)
app.command()(plan)
app.command()(verify)
app.command()(bench)
app.command()(quantize)
app.command()(evaluate)
app.command()(simulate)
app.command()(replay)
app.command()(report)
app.command()(doctor)
app.command()(pull)
app.command()(ls)
app.command()(rm)
app.add_typer(export, name="export")
app.add_typer(config, name="config")
app.command()(completion)
app.command()(imatrix)


def _show_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        console.text(f"clover-local {version('clover-local')}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def options(
    context: typer.Context,
    version: bool = typer.Option(
        False,
        "--version",
        callback=_show_version,
        is_eager=True,
        help="Show the version and leave.",
    ),
) -> None:
    """Runs Clover, a block-diffusion mixture-of-experts language model, on this machine."""
    if context.invoked_subcommand is None:
        console.text(context.get_help())
        raise typer.Exit(USAGE)


def main() -> int:
    """Runs the command line; returns the exit code (0, 1 failed, 2 usage, 130 interrupted)."""
    # Python has no stream at all where the caller closed it.
    sys.stdin = sys.stdin or open(os.devnull, encoding="utf-8")  # noqa: SIM115
    sys.stdout = sys.stdout or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without the character shows `?`
    code = _run()
    try:
        sys.stdout.flush()
    except OSError as error:
        console.abandon(sys.stdout)
        if code == 0 and not isinstance(error, BrokenPipeError):
            failures.report(error)
            return FAILED
    return code


def _run() -> int:
    try:
        return app(prog_name="clover-local", standalone_mode=False) or 0
    except typer.TyperException as usage:
        return _show_usage(usage)
    except typer.Abort:
        return INTERRUPTED
    except (SystemExit, KeyboardInterrupt):
        raise
    except BaseException as error:  # all else; a panic of a Rust package is no Exception
        failures.report(error)
        return FAILED


def _show_usage(usage: typer.TyperException) -> int:
    """A wrong call: one line, and where to read more."""
    context: typer.Context | None = getattr(usage, "ctx", None)
    message = usage.format_message()
    hint = f" (see `{context.command_path} --help`)" if context else ""
    console.error(message.rstrip(".") + hint)
    return usage.exit_code
