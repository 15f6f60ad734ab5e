"""`clover-local completion`: what a shell completes, as a script for bash, zsh or fish.

The script is made once from the commands themselves and knows them by heart: typer's own
completion starts Python and imports every command at each Tab. Only what changes is looked up by
the shell: files, and the names in the hub's cache. What a flag or an argument takes follows from
its metavar, which is what `--help` shows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal, get_args

import typer

from clover_local.cli import completion_scripts, console
from clover_local.cli.completion_scripts import NOTHING, Flag, ShellCommand, Values
from clover_local.decoding.keys import SINGLE_MODES

Shell = Literal["bash", "zsh", "fish"]
ShellArg = Annotated[Shell, typer.Argument(help="Whose script to print.", metavar="SHELL")]
SCRIPTS: dict[Shell, Callable[[ShellCommand], str]] = {
    "bash": completion_scripts.bash,
    "zsh": completion_scripts.zsh,
    "fish": completion_scripts.fish,
}
_MEANT: dict[str, Values] = {
    "MODEL": Values("model"),
    "NAME": Values("cached"),
    "REPO": Values("cached"),
    "FILE": Values("file"),
    "TRACE": Values("file"),
    "DEST": Values("file"),
    "OUT": Values("file"),
    "SHELL": Values("words", get_args(Shell)),
    "MODES": Values("words", SINGLE_MODES),
}
"""By metavar, without a suffix such as the one of OUT.gguf."""


def completion(call: typer.Context, shell: ShellArg) -> None:
    """Print the completion script of a shell. To install it, or again after an update:

    \b
    bash, with the package bash-completion:
      mkdir -p ~/.local/share/bash-completion/completions
      clover-local completion bash > ~/.local/share/bash-completion/completions/clover-local

    \b
    zsh, with `fpath+=~/.zfunc` in ~/.zshrc before compinit:
      mkdir -p ~/.zfunc
      clover-local completion zsh > ~/.zfunc/_clover-local

    \b
    fish:
      mkdir -p ~/.config/fish/completions
      clover-local completion fish > ~/.config/fish/completions/clover-local.fish

    \b
    For one session of bash, or without bash-completion in ~/.bashrc:
      eval "$(clover-local completion bash)"
    """
    console.write(SCRIPTS[shell](described(call.find_root().command)))


def described(program: Any, path: tuple[str, ...] = ()) -> ShellCommand:
    """A command of typer's, with all below it, as far as a shell is concerned."""
    flags, arguments = [], []
    for parameter in program.params:
        if parameter.hidden:
            continue
        takes = None if getattr(parameter, "is_flag", False) else _taken(parameter)
        if parameter.param_type_name == "argument":
            arguments.append(takes or NOTHING)
            continue
        names = (*parameter.opts, *parameter.secondary_opts)
        flags.append(Flag(names, _first(parameter.help), takes))
    flags.append(Flag(("--help", "-h"), "Show this message and exit", None))
    below = getattr(program, "commands", {})
    return ShellCommand(
        path,
        _first(program.help),
        tuple(flags),
        tuple(arguments),
        tuple(described(each, (*path, name)) for name, each in below.items()),
    )


def _taken(parameter: Any) -> Values:
    """What follows a flag, or stands for an argument."""
    metavar = (parameter.metavar or "").strip("[]")
    if "|" in metavar:
        return Values("words", tuple(metavar.split("|")))
    return _MEANT.get(metavar.partition(".")[0], NOTHING)


def _first(help: str | None) -> str:
    """The first sentence or line of a help text."""
    return " ".join((help or "").split("\n\n")[0].split()).rstrip(".")
