"""Completion scripts for bash, zsh and fish, as text."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

Kind = Literal["words", "model", "cached", "file", "none"]
CACHE = "${HF_HUB_CACHE:-${HF_HOME:-${XDG_CACHE_HOME:-$HOME/.cache}/huggingface}/hub}"


@dataclass(frozen=True)
class Values:
    """What may stand in a place: one of `words`, a model, one in the hub's cache, a file."""

    kind: Kind
    words: tuple[str, ...] = ()


NOTHING = Values("none")


@dataclass(frozen=True)
class Flag:
    """A flag by all its names; `takes` None: no value follows."""

    names: tuple[str, ...]
    help: str
    takes: Values | None


@dataclass(frozen=True)
class ShellCommand:
    """A command, or a group of `below`."""

    path: tuple[str, ...]
    help: str
    flags: tuple[Flag, ...]
    arguments: tuple[Values, ...]
    below: tuple["ShellCommand", ...]

    @property
    def name(self) -> str:
        """The last word of it."""
        return self.path[-1]

    def all(self) -> Iterator["ShellCommand"]:
        """The command and all below it."""
        yield self
        for each in self.below:
            yield from each.all()


def bash(program: ShellCommand) -> str:
    """The script for bash 3.2 and later, which needs no bash-completion."""

    def cases(pairs: list[tuple[str, str]]) -> str:
        """`pattern | pattern) REPLY='...' ;;` for (pattern, reply)."""
        patterns: dict[str, list[str]] = {}
        for pattern, reply in pairs:
            patterns.setdefault(reply, []).append(pattern)
        return "\n".join(
            f"    {'|'.join(each)}) REPLY='{reply}' ;;" for reply, each in patterns.items()
        )

    def reply(values: Values) -> str:
        return " ".join((values.kind, *values.words))

    every = list(program.all())
    quoted = {each.path: f"'{' '.join(each.path)}'" for each in every}
    values = [
        (f"{quoted[command.path]}:{name}", reply(flag.takes))
        for command in every
        for flag in command.flags
        if flag.takes is not None
        for name in flag.names
    ]
    arguments = [
        (f"{quoted[command.path]}:{place}", reply(taken))
        for command in every
        for place, taken in enumerate(command.arguments)
    ]
    flags = [
        (quoted[command.path], " ".join(name for flag in command.flags for name in flag.names))
        for command in every
    ]
    groups = [
        (quoted[command.path], " ".join(each.name for each in command.below))
        for command in every
        if command.below
    ]
    return _BASH.format(
        cache=CACHE,
        values=cases(values),
        arguments=cases(arguments),
        flags=cases(flags),
        groups=cases(groups),
    )


_BASH = """# bash completion of clover-local. To install it, with the package bash-completion:
#   mkdir -p ~/.local/share/bash-completion/completions
#   clover-local completion bash > ~/.local/share/bash-completion/completions/clover-local
# Without that package, put into ~/.bashrc:
#   eval "$(clover-local completion bash)"

# Names are data: none is expanded, and all come quoted; with $1 only those that the hub may give.
_clover_local_cached() {{
  local folder name quoted
  for folder in "{cache}"/models--*; do
    [ -d "$folder/snapshots" ] || continue
    name=${{folder##*/models--}}
    name=${{name/--//}}
    [[ -n $1 && $name == *[!A-Za-z0-9._/-]* ]] && continue
    printf -v quoted %q "$name"
    [[ $name == "$cur"* || $quoted == "$cur"* ]] && COMPREPLY+=("$quoted")
  done
}}

_clover_local_lines() {{
  local line
  while IFS= read -r line; do
    [[ -z $line ]] || COMPREPLY+=("$line")
  done
}}

# REPLY: what follows flag $2 of command $1; empty: nothing does.
_clover_local_value() {{
  REPLY=
  case "$1:$2" in
{values}
  esac
}}

# REPLY: what argument $2 of command $1 is, counted from 0.
_clover_local_argument() {{
  REPLY=none
  case "$1:$2" in
{arguments}
  esac
}}

_clover_local_flags() {{
  REPLY=
  case "$1" in
{flags}
  esac
}}

# REPLY: the commands of group $1; empty: it is no group.
_clover_local_group() {{
  REPLY=
  case "$1" in
{groups}
  esac
}}

_clover_local() {{
  local cur=${{COMP_WORDS[COMP_CWORD]}} REPLY command= place=0 i word kind= IFS=$' \\t\\n'
  COMPREPLY=()
  for ((i = 1; i < COMP_CWORD; i++)); do
    word=${{COMP_WORDS[i]}}
    if [[ $word == -* ]]; then
      _clover_local_value "$command" "$word"
      if [[ -n $REPLY ]]; then
        ((i++))
        [[ ${{COMP_WORDS[i]}} == = ]] && ((i++)) # bash takes --flag=value apart
        if ((i >= COMP_CWORD)); then
          kind=$REPLY
          [[ $cur == = ]] && cur=
        fi
      fi
      continue
    fi
    _clover_local_group "$command"
    if [[ -n $REPLY ]]; then
      command=${{command:+$command }}$word
    else
      ((place++))
    fi
  done
  if [[ -z $kind && $cur == -* ]]; then
    _clover_local_flags "$command"
    kind="words $REPLY"
  elif [[ -z $kind ]]; then
    _clover_local_group "$command"
    if [[ -n $REPLY ]]; then
      kind="words $REPLY"
    else
      _clover_local_argument "$command" "$place"
      kind=$REPLY
    fi
  fi
  case $kind in
    words*) COMPREPLY=($(compgen -W "${{kind#words }}" -- "$cur")) ;;
    cached) _clover_local_cached "" ;;
    model)
      compopt -o filenames 2>/dev/null # readline quotes files, but not all of a name that is none
      _clover_local_lines <<< "$(compgen -W demo -- "$cur")"
      _clover_local_cached ids
      _clover_local_lines <<< "$(compgen -d -- "$cur"; compgen -f -X '!*.gguf' -- "$cur")"
      ;;
    file)
      compopt -o filenames 2>/dev/null
      _clover_local_lines <<< "$(compgen -f -- "$cur")"
      ;;
  esac
}}

complete -F _clover_local clover-local
"""


def zsh(program: ShellCommand) -> str:
    """The script for zsh: a function for each command, of specifications for `_arguments`."""
    functions = "\n".join(_zsh_function(command) for command in program.all())
    return _ZSH.format(cache=CACHE, functions=functions)


def _zsh_function(command: ShellCommand) -> str:
    name = "_".join(("_clover_local", *command.path))
    actions: dict[Kind, Callable[[Values], str]] = {
        "words": lambda values: f"({' '.join(values.words)})",
        "model": lambda values: "_clover_local_models",
        "cached": lambda values: "_clover_local_cached",
        "file": lambda values: "_files",
        "none": lambda values: " ",
    }

    def spec(names: tuple[str, ...], flag: Flag) -> Iterator[str]:
        excluded = f"({' '.join(names)})" if len(names) > 1 else ""
        for each in names:
            text = f"{excluded}{each}"
            if flag.takes is None:
                yield _single_quoted(f"{text}[{_zsh_text(flag.help)}]")
                continue
            follows = "=" if each.startswith("--") else ""
            action = actions[flag.takes.kind](flag.takes)
            yield _single_quoted(f"{text}{follows}[{_zsh_text(flag.help)}]:value:{action}")

    specs = [text for flag in command.flags for text in spec(flag.names, flag)]
    specs += [
        _single_quoted(f"{place}:argument:{actions[taken.kind](taken)}")
        for place, taken in enumerate(command.arguments, 1)
    ]
    if not command.below:
        return f"{name}() {{\n  _arguments \\\n    " + " \\\n    ".join(specs) + "\n}\n"
    rows = "\n".join(
        f"    {_single_quoted(each.name + ':' + _zsh_text(each.help))}" for each in command.below
    )
    calls = "\n".join(
        f"        {each.name}) {'_'.join(('_clover_local', *each.path))} ;;"
        for each in command.below
    )
    specs += ["'1: :->command'", "'*:: :->argument'"]
    return (
        f"{name}() {{\n  local state line curcontext=$curcontext\n  local -a commands\n"
        f"  commands=(\n{rows}\n  )\n  _arguments -C \\\n    "
        + " \\\n    ".join(specs)
        + "\n  case $state in\n    command) _describe command commands ;;\n"
        + f"    argument)\n      case $words[1] in\n{calls}\n      esac\n      ;;\n  esac\n}}\n"
    )


def _zsh_text(text: str) -> str:
    for character in "\\[]:":
        text = text.replace(character, f"\\{character}")
    return text


def _single_quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


_ZSH = """#compdef clover-local
# zsh completion of clover-local. To install it, with `fpath+=~/.zfunc` in ~/.zshrc before compinit:
#   mkdir -p ~/.zfunc
#   clover-local completion zsh > ~/.zfunc/_clover-local

_clover_local_cached() {{
  local folder
  local -a names
  for folder in "{cache}"/models--*/snapshots(N/); do
    folder=${{${{folder:h:t}}#models--}}
    names+=("${{folder/--//}}")
  done
  compadd "$@" -- $names
}}

_clover_local_models() {{
  compadd "$@" -- demo
  _clover_local_cached "$@"
  _files -g '*.gguf(-.)'
}}

{functions}
if [[ $funcstack[1] == _clover-local ]]; then
  _clover_local "$@"
else
  compdef _clover_local clover-local
fi
"""


def fish(program: ShellCommand) -> str:
    """The script for fish: a line for each flag of each command."""
    return _FISH.format(lines="\n".join(_fish_lines(program, "__fish_use_subcommand")))


def _fish_lines(command: ShellCommand, before: str) -> Iterator[str]:
    """The lines of a group and all below it; `before` holds while none of `below` is there."""
    names = " ".join(each.name for each in command.below)
    for each in command.below:
        yield _fish_line(before, f"-a {each.name}", each.help)
        inside = f"__fish_seen_subcommand_from {each.name}"
        if command.path:
            inside = f"__fish_seen_subcommand_from {command.name}; and {inside}"
        if each.below:
            inner = " ".join(low.name for low in each.below)
            yield from _fish_lines(each, f"{inside}; and not __fish_seen_subcommand_from {inner}")
            continue
        for flag in each.flags:
            yield _fish_line(inside, _fish_flag(flag), flag.help)
        for values in dict.fromkeys(each.arguments):
            yield _fish_line(inside, _fish_values(values), "")
    if not command.path:
        for flag in command.flags:
            yield _fish_line(
                f"not __fish_seen_subcommand_from {names}", _fish_flag(flag), flag.help
            )


def _fish_line(condition: str, rest: str, help: str) -> str:
    description = f" -d {_fish_quoted(help)}" if help else ""
    return f"complete -c clover-local -n {_fish_quoted(condition)} {rest}{description}"


def _fish_flag(flag: Flag) -> str:
    names = " ".join(
        f"-l {name.removeprefix('--')}" if name.startswith("--") else f"-s {name[1:]}"
        for name in flag.names
    )
    return names if flag.takes is None else f"{names} -r {_fish_values(flag.takes)}"


def _fish_values(values: Values) -> str:
    return {
        "words": f"-f -a '{' '.join(values.words)}'",
        "model": "-F -a '(__clover_local_models)'",
        "cached": "-f -a '(__clover_local_cached)'",
        "file": "-F",
        "none": "-f",
    }[values.kind]


def _fish_quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


_FISH = """# fish completion of clover-local. To install it:
#   mkdir -p ~/.config/fish/completions
#   clover-local completion fish > ~/.config/fish/completions/clover-local.fish

function __clover_local_cached
    set -l folder $HOME/.cache/huggingface/hub
    set -q XDG_CACHE_HOME; and set folder $XDG_CACHE_HOME/huggingface/hub
    set -q HF_HOME; and set folder $HF_HOME/hub
    set -q HF_HUB_CACHE; and set folder $HF_HUB_CACHE
    for found in $folder/models--*/snapshots
        string replace -- -- / (string replace -r '.*/models--(.*)/snapshots' '$1' -- $found)
    end
end

function __clover_local_models
    echo demo
    __clover_local_cached
end

complete -c clover-local -f
{lines}
"""
