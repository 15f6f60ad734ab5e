"""What the user set once and for all: the config file, and above it the environment.

A key is the name of a flag; a value is what the flag takes. Order: the model's defaults, the config
file, the environment, flags, `/set`. A mistake in either place is an error that names the place;
what a flag without effect is told about, a general default is not.
"""

import difflib
import os
import reprlib
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from clover_local.decoding.keys import KEYS, Key, choice, switch, whole
from clover_local.errors import SettingsError
from clover_local.files import require_file, user_path
from clover_local.memory.sizes import parse_size
from clover_local.placement import DEVICES, DTYPES
from clover_local.residency.names import POLICY_NAMES

PREFIX = "CLOVER_"
FILE_VARIABLE = "CLOVER_CONFIG"
NO_SETTINGS = (FILE_VARIABLE, "CLOVER_DEBUG", "CLOVER_KERNELS")
"""Variables that are read elsewhere."""
Watch = Literal["off", "block", "heat"]
"""How the active block is shown."""
WATCH: tuple[Watch, ...] = get_args(Watch)
ThinkingView = Literal["show", "fold"]
"""How thinking appears."""
THINKING: tuple[ThinkingView, ...] = get_args(ThinkingView)


def _text(expects: str, help: str) -> Key:
    def convert(value: object) -> str:
        if not isinstance(value, str):
            raise TypeError
        if not value.strip() or "\0" in value:
            raise ValueError
        return value

    return Key(expects, convert, metavar="TEXT", help=help)


def _size(help: str) -> Key:
    def convert(value: object) -> str:
        if not isinstance(value, str):
            raise TypeError
        try:
            parse_size(value, "")
        except SettingsError:
            raise ValueError from None
        return value

    return Key("a size such as 16GB or 15360MiB", convert, metavar="SIZE", help=help)


def _path(help: str) -> Key:
    def convert(value: object) -> Path:
        if not isinstance(value, str) or not value.strip():
            raise TypeError
        return user_path(value)

    return Key("the path of a file", convert, metavar="FILE", help=help)


FLAG_KEYS: dict[str, Key] = {
    "model": _text("a folder, a .gguf file, a hub id or demo", "chat: the model without MODEL."),
    "system": _text("a text", "System prompt."),
    "think": switch("Think before answering, where the template can switch it."),
    "think_budget": whole(1).named("N", "Think, and end it after N tokens of the answer."),
    "context": whole(1).named("N", "Most tokens of prompt and answer together."),
    "device": choice(DEVICES, "Where to run; default: cuda where there is one."),
    "dtype": choice(DTYPES, "Default: float32 on cpu, bfloat16 on cuda."),
    "gpu_memory": _size("Most memory to take of the device."),
    "expert_slots": whole(1).named("N", "Experts to keep on the device; default: as many as fit."),
    "pin_limit": _size("Most pinned host memory."),
    "policy": choice(POLICY_NAMES, "Which experts stay on the device."),
    "expert_profile": _path("Most used experts of earlier runs: they are loaded first."),
    "cpu_experts": choice(("off",), "Compute missing experts on the CPU: not there yet."),
    "watch": choice(WATCH, "chat: how the active block is shown."),
    "stats": switch("generate: show speed and memory on stderr."),
    "heat": switch("generate: tokens coloured by their confidence."),
    "strict": switch("Refuse flags that would have no effect."),
    "quiet": switch("No notes, no progress; of every command."),
}
"""What is no field of `Settings`, as `KEYS`."""
ALL_KEYS = {**KEYS, **FLAG_KEYS}


@dataclass(frozen=True)
class Preference:
    """A value, and the place it came from: a file's path or a variable's name."""

    value: object
    source: str


@dataclass(frozen=True)
class Preferences:
    """What the file and the environment say, by key; and what of the environment is no key."""

    values: Mapping[str, Preference]
    unknown: tuple[str, ...] = ()  # one sentence each


def config_path(environment: Mapping[str, str] = os.environ) -> Path | None:
    """The config file that is meant, there or not; None: none (`CLOVER_CONFIG=/dev/null`).

    Raises:
        SettingsError: the variable holds no path.
    """
    named = environment.get(FILE_VARIABLE)
    if named:
        if named == os.devnull:
            return None
        try:
            return user_path(named)
        except SettingsError as error:
            raise SettingsError(f"{FILE_VARIABLE} is {error}") from None
    folder = environment.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")
    return Path(folder) / "clover-local" / "config.toml"


def read_preferences(environment: Mapping[str, str] = os.environ) -> Preferences:
    """The config file with the environment on top.

    Raises:
        SettingsError: a file that is no TOML or cannot be read, an unknown key in it, a value out
            of range in either place.
    """
    path = config_path(environment)
    must_exist = bool(environment.get(FILE_VARIABLE))
    values = {} if path is None else _of_file(path, must_exist=must_exist)
    unknown = []
    for variable, text in environment.items():
        if not variable.startswith(PREFIX) or variable in NO_SETTINGS or not text:
            continue
        key = variable.removeprefix(PREFIX).lower()
        if key in ALL_KEYS:
            remedy = "correct it, or unset it"
            value = _converted(key, text, place=variable, remedy=remedy)
            values[key] = Preference(value, variable)
        else:
            near = _nearest(key)
            hint = f"did you mean {PREFIX}{near.upper()}?" if near else "unset it"
            unknown.append(f"{variable} is no setting of clover-local: {hint}")
    return Preferences(values, tuple(unknown))


def _of_file(path: Path, *, must_exist: bool) -> dict[str, Preference]:
    values: dict[str, Preference] = {}
    for name, given in _table(path, must_exist=must_exist).items():
        key = name.replace("-", "_")
        if key not in ALL_KEYS:
            near = _nearest(key)
            hint = f"did you mean {near}?" if near else "known are " + ", ".join(ALL_KEYS)
            raise SettingsError(f"{path} has the unknown key {name!r}: {hint}")
        if key in values:
            raise SettingsError(f"{path} has {key} twice: remove one of the lines")
        value = _converted(key, given, place=f"{path}: {name}", remedy="correct that line")
        if isinstance(value, Path):
            value = path.parent / value
        values[key] = Preference(value, str(path))
    return values


def _table(path: Path, *, must_exist: bool) -> Mapping[str, object]:
    try:
        require_file(path)
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        if must_exist:
            raise SettingsError(
                f"{FILE_VARIABLE} names {path}, which is not there: correct it, or unset it"
            ) from None
        return {}
    except OSError as error:
        raise SettingsError(
            f"{path} cannot be read ({error.strerror}): mend it, or set "
            f"{FILE_VARIABLE}={os.devnull} to do without"
        ) from None
    except (ValueError, RecursionError) as error:  # no UTF-8, no TOML, tables without end
        why = " ".join(str(error).split())
        raise SettingsError(f"{path} is no TOML ({why}): correct that line") from None


def _converted(key: str, value: object, *, place: str, remedy: str) -> object:
    if isinstance(value, dict):
        raise SettingsError(f"{place} is a table: keys stand without one, {remedy}")
    try:
        return ALL_KEYS[key].convert(value)
    except SettingsError as error:
        raise SettingsError(f"{place} is {error}; {remedy}") from None
    except (TypeError, ValueError):
        expects = ALL_KEYS[key].expected
        raise SettingsError(
            f"{place} is {reprlib.repr(value)}: expected {expects}; {remedy}"
        ) from None


def _nearest(key: str) -> str | None:
    found = difflib.get_close_matches(key.lower(), ALL_KEYS, n=1)
    return found[0] if found else None


def shown(value: object) -> str:
    """A setting's value as `/set` would take it."""
    if isinstance(value, tuple):
        return ",".join(map(str, value)) or "none"
    if isinstance(value, bool):
        return "on" if value else "off"
    if value is None:
        return "-"
    return str(value)


def template(default_of: Callable[[str], object]) -> str:
    """A config file in which every key is a comment, with what it is for.

    Args:
        default_of: the value that a key has where nothing says otherwise; None: it depends.
    """
    lines = [
        "# Defaults of clover-local. The model's own values are below these; the environment",
        "# (CLOVER_THRESHOLD=0.9), flags (--threshold 0.9) and /set are above them.",
        "# `clover-local config explain` says which value counts, and why.",
    ]
    for key, setting in ALL_KEYS.items():
        value = default_of(key)
        example = _toml(setting.metavar or "on" if value is None else value)
        lines += ["", f"# {setting.help or setting.expects}", f"#{key} = {example}"]
    return "\n".join(lines) + "\n"


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, tuple):
        return f"[{', '.join(map(_toml, value))}]"
    return str(value)
