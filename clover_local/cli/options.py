"""Arguments and flags that several commands share, as types; named as in `/set` and `Settings`."""

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, TypeAlias, get_type_hints

import typer

from clover_local.cli import console
from clover_local.cli.preferences import Preference, Preferences, Watch, read_preferences
from clover_local.decoding.keys import KEYS, Key
from clover_local.decoding.settings import Place
from clover_local.errors import CloverError, SettingsError
from clover_local.kernels.choice import check_name
from clover_local.memory.sizes import parse_size
from clover_local.placement import MemoryOptions
from clover_local.residency.names import POLICY_NAMES

CHARTS = (".png", ".svg")


_PREFERENCES = "clover_local.preferences"
"""Where a call has what was read, from its first flag on."""


def _set_quiet(call: typer.Context, quiet: bool) -> bool:
    """Reads the user's preferences, for all of the command, and reports what is none of them.

    That is done here because every command has the flag. Without it the preferences count.
    """
    preferences = call.meta[_PREFERENCES] = read_preferences()

    def switched(name: str, given: bool) -> bool:
        found = None if _is_given(call, name) else preferences.values.get(name)
        return given if found is None else bool(found.value)

    quiet = switched("quiet", quiet)
    console.set_quiet(quiet)
    strict = "strict" in call.params and switched("strict", bool(call.params["strict"]))
    _report_unknown(preferences, strict=strict)
    return quiet


def _is_given(call: typer.Context, name: str) -> bool:
    source = call.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


ModelArg: TypeAlias = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="Folder or hub id of a Clover checkpoint, a .gguf file, or `demo`.",
        show_default=False,
    ),
]
OptionalModelArg: TypeAlias = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL",
        help="Folder or hub id of a checkpoint, or a .gguf file; without it the bundled `demo`.",
        show_default=False,
    ),
]
TraceArg: TypeAlias = Annotated[
    Path, typer.Argument(metavar="TRACE", help="A file that --trace wrote.", show_default=False)
]
JsonOpt: TypeAlias = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
QuietOpt: TypeAlias = Annotated[
    bool,
    typer.Option("--quiet/--no-quiet", "-q", callback=_set_quiet, help="No notes, no progress."),
]
StrictOpt: TypeAlias = Annotated[
    bool,
    typer.Option(
        "--strict/--no-strict",
        is_eager=True,  # `_set_quiet` has to know it
        help="Refuse flags that would have no effect.",
    ),
]
WatchOpt: TypeAlias = Annotated[
    Watch | None,
    typer.Option(metavar="off|block|heat", help="How the active block is shown; default: block."),
]
HeatOpt: TypeAlias = Annotated[
    bool | None,
    typer.Option("--heat/--no-heat", help="On a terminal: tokens coloured by how sure each was."),
]
StatsOpt: TypeAlias = Annotated[
    bool | None, typer.Option("--stats/--no-stats", help="Show speed and memory on stderr.")
]
PromptOpt: TypeAlias = Annotated[
    str | None, typer.Option("--prompt", "-p", metavar="TEXT", help="What to answer.")
]
SystemOpt: TypeAlias = Annotated[str | None, typer.Option(metavar="TEXT", help="System prompt.")]
ThinkOpt: TypeAlias = Annotated[
    bool | None,
    typer.Option(
        "--think/--no-think", help="Think before answering, where the template can switch it."
    ),
]
ThinkBudgetOpt: TypeAlias = Annotated[
    int | None,
    typer.Option(min=1, metavar="N", help="Think before answering, for N tokens at most."),
]
ContextOpt: TypeAlias = Annotated[
    int | None, typer.Option(min=1, metavar="N", help="Most tokens of prompt and answer together.")
]
DeviceOpt: TypeAlias = Annotated[
    str | None,
    typer.Option(metavar="cpu|cuda", help="Where to run; default: cuda where there is one."),
]
DtypeOpt: TypeAlias = Annotated[
    str | None,
    typer.Option(metavar="float32|bfloat16", help="Default: float32 on cpu, bfloat16 on cuda."),
]

GpuMemoryOpt: TypeAlias = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        help="Most memory to take of the device, such as 15360MiB: of a card, or on cpu of RAM.",
    ),
]
ExpertSlotsOpt: TypeAlias = Annotated[
    int | None,
    typer.Option(metavar="N", help="Experts to keep on the device; default: as many as fit."),
]
PinLimitOpt: TypeAlias = Annotated[
    str | None, typer.Option(metavar="SIZE", help="Most pinned host memory.")
]
PolicyOpt: TypeAlias = Annotated[
    str | None,
    typer.Option(metavar="|".join(POLICY_NAMES), help="Which experts stay on the device."),
]
ExpertProfileOpt: TypeAlias = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Most used experts of earlier runs: they are loaded first."),
]
CpuExpertsOpt: TypeAlias = Annotated[
    str | None,
    typer.Option(metavar="off", help="Compute missing experts on the CPU: not there yet."),
]

MEMORY: Mapping[str, Any] = {
    "gpu_memory": GpuMemoryOpt,
    "expert_slots": ExpertSlotsOpt,
    "pin_limit": PinLimitOpt,
    "policy": PolicyOpt,
    "expert_profile": ExpertProfileOpt,
    "cpu_experts": CpuExpertsOpt,
}
"""The flags of `takes_memory`."""


def memory_options(call: typer.Context) -> MemoryOptions:
    """The memory flags of a call.

    Raises:
        SettingsError: a size that is none, or what this version cannot do.
    """
    given = call.params
    if given["cpu_experts"] not in (None, "off"):
        raise SettingsError(
            f"--cpu-experts {given['cpu_experts']}: missing experts are always copied to the "
            "device in this version: leave it out",
            keys={"cpu_experts"},
        )
    sizes = {
        name: None if given[name] is None else parse_size(given[name], f"--{flag}")
        for name, flag in (("gpu_memory", "gpu-memory"), ("pin_limit", "pin-limit"))
    }
    return MemoryOptions(
        device_bytes=sizes["gpu_memory"],
        expert_slots=given["expert_slots"],
        pin_limit=sizes["pin_limit"],
        policy=given["policy"],
        profile=given["expert_profile"],
    )


def require_plot(path: Path) -> None:
    """Says before any work whether `--plot` can write a chart to `path`.

    Raises:
        CloverError: another kind of file, no regular one, no folder for it, no matplotlib.
    """
    if path.suffix not in CHARTS:
        raise CloverError(f"--plot {path}: a chart is {' or '.join(CHARTS)}, name the file so")
    if not path.parent.is_dir():
        raise CloverError(f"--plot {path}: there is no folder {path.parent}, make it first")
    if path.exists() and not path.is_file():
        raise CloverError(f"--plot {path} is there and no file: pass another name")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise CloverError("--plot needs matplotlib: pip install 'clover-local[plot]'") from None


def takes_memory(command: Callable[..., None]) -> Callable[..., None]:
    """The command with the flags of `MEMORY`, which it reads by `memory_options`."""
    return _with_flags(command, MEMORY)


def takes_settings(command: Callable[..., None]) -> Callable[..., None]:
    """The command with a flag for each of `KEYS`, which it reads by `given_settings`."""
    return _with_flags(command, {name: _flag(name, key) for name, key in KEYS.items()})


def _with_flags(
    command: Callable[..., None], annotations: Mapping[str, Any]
) -> Callable[..., None]:
    """The command with further flags, None where not given, that only `call.params` has."""
    own = inspect.signature(command)
    hints = get_type_hints(command, include_extras=True)
    parameters = [each.replace(annotation=hints[name]) for name, each in own.parameters.items()]
    flags = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
        for name, annotation in annotations.items()
    ]

    @functools.wraps(command)
    def run(**values: Any) -> None:
        command(**{name: value for name, value in values.items() if name not in annotations})

    merged = own.replace(parameters=[*parameters, *flags])
    vars(run)["__signature__"] = merged
    run.__annotations__ = {name: each.annotation for name, each in merged.parameters.items()}
    return run


def _flag(name: str, key: Key) -> object:
    flag = f"--{name.replace('_', '-')}"
    if key.kind is bool:
        names = f"{flag}/--no-{flag.removeprefix('--')}"
        return Annotated[bool | None, typer.Option(names, help=key.help)]
    option = typer.Option(flag, metavar=key.metavar, help=key.help)
    return Annotated[key.kind | None, option]


def given_settings(call: typer.Context) -> dict[str, object]:
    """What a call sets of `Settings`, by flag or as `configured`, by name."""
    return {key: call.params[key] for key in KEYS if call.params[key] is not None}


def configured(*names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Gives flags of a command that were not given the user's preferences.

    `origins` says where a value is from. Checks `CLOVER_KERNELS` before anything is loaded.

    Args:
        names: the flags that obey preferences; none: all that are keys of theirs.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def run(**values: Any) -> None:
            call: typer.Context = values["call"]
            preferences: Preferences = call.meta[_PREFERENCES]
            require_kernels()
            used = {
                name: preference
                for name, preference in preferences.values.items()
                if name in (names or values) and name in values and not _is_given(call, name)
            }
            for name, preference in used.items():
                values[name] = call.params[name] = preference.value
            call.obj = {
                name: Place.ARGUMENT if name == "model" else Place.FLAG
                for name in values
                if _is_given(call, name)
            }
            call.obj |= {name: preference.source for name, preference in used.items()}
            with naming_places(used):
                command(**values)

        return run

    return decorate


def origins(call: typer.Context) -> dict[str, str]:
    """Where each value of a `configured` command is from: `flag`, a file's path, a variable."""
    found: dict[str, str] = call.obj
    return found


def flags_of(call: typer.Context, *names: str) -> dict[str, object]:
    """Those of `names` that stand on the command line itself, with their values."""
    return {name: call.params[name] for name in names if origins(call).get(name) == Place.FLAG}


def _report_unknown(preferences: Preferences, *, strict: bool) -> None:
    if preferences.unknown and strict:
        raise SettingsError(f"{'; '.join(preferences.unknown)} (or drop --strict)")
    for sentence in preferences.unknown:
        console.note(f"note: {sentence}")


def require_kernels() -> None:
    """Raises SettingsError where `CLOVER_KERNELS` asks for kernels that do not exist."""
    try:
        check_name()
    except ValueError as error:
        raise SettingsError(f"{error}: set one of these, or unset it") from None


@contextmanager
def naming_places(used: Mapping[str, Preference]) -> Iterator[None]:
    """Within it, an error on a flag that nobody typed gets a note on where its value is from."""
    try:
        yield
    except CloverError as error:
        for name, preference in used.items():
            if name in error.keys:
                flag = name if name == "model" else f"--{name.replace('_', '-')}"
                error.add_note(f"{flag} comes from {preference.source}")
        raise
