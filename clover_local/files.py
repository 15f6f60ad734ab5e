"""Files: what may be opened as one, typed values of JSON objects, writing whole or not at all.

A pipe would block and a device might never end, so only regular files are opened. Values are read
by converters whose errors say what was expected.
"""

import errno
import json
import os
import reprlib
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from clover_local.errors import ConfigError, SettingsError

# Bounds far beyond any real model. Within them sizes multiply, and controls act on float32 logits,
# without overflow, and no list that a number in a file asks for fills the memory.
LARGEST = 2**31 - 1
MOST_LAYERS = 1000
MOST_TOKENS = 1 << 22  # of a context: the rotary tables have a row for each
STRONGEST = 1e6

T = TypeVar("T")


def require_file(path: Path) -> None:
    """Raises OSError, as opening it would, where `path` is no regular file and no link to one.

    A file that is simply not there is a FileNotFoundError; a link to nothing is none, because the
    file is then meant to be there.
    """
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        if path.is_symlink():
            raise OSError(errno.EINVAL, "a link to nothing", str(path)) from None
        raise
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "no regular file", str(path))


def user_path(text: str) -> Path:
    """The path that a user wrote, with the home folder in the place of `~`.

    Raises:
        SettingsError: `~name` of nobody, or a NUL in it.
    """
    if "\0" in text:
        raise SettingsError(f"{text!r} is no path: it has a NUL in it, leave that out")
    try:
        return Path(text).expanduser()
    except RuntimeError:
        raise SettingsError(
            f"{text}: {Path(text).parts[0]} has no home folder: write the whole path (./~... for "
            "a name that begins with `~`)"
        ) from None


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A new file beside `path` that takes its place, safe on disk, when all has gone well.

    Raises:
        OSError: the file cannot be written; nothing of it is left.
    """
    temporary = path.with_name(f".{path.name}.partial")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        sync_folder(path.parent)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise


def sync_folder(folder: Path) -> None:
    """Makes new names in `folder` safe themselves; only where folders can be opened."""
    if os.name == "posix":
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def json_bytes(values: Mapping[str, object]) -> bytes:
    """A JSON object as the text of a file, indented, keys in the order given."""
    return (json.dumps(values, indent=2, ensure_ascii=False) + "\n").encode()


class Reader:
    """Typed access to one JSON object; remembers which keys were read."""

    def __init__(self, source: str, values: Mapping[str, Any]) -> None:
        self.source = source
        self.values = values
        self.read: set[str] = set()

    def get(self, key: str, convert: Callable[[Any], T], *default: T) -> T:
        """The value of `key`, or the default where it is absent or null."""
        self.read.add(key)
        value = self.values.get(key)
        if value is None:
            if default:
                return default[0]
            raise ConfigError(f"{self.source} lacks the key {key!r}: pass a complete Clover model")
        try:
            return convert(value)
        except (TypeError, ValueError) as error:
            shown = reprlib.repr(value)
            raise ConfigError(f"{self.source}: {key!r} is {shown}, expected {error}") from None


def as_integer(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError("an integer")
    if abs(value) > LARGEST:
        raise ValueError(f"an integer of at most {LARGEST}")
    return value


def as_size(value: Any) -> int:
    if as_integer(value) < 1:
        raise ValueError("a positive integer")
    return int(value)


def as_token_id(value: Any) -> int:
    if as_integer(value) < 0:
        raise ValueError("a token id (an integer of 0 or more)")
    return int(value)


def as_number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError("a number")
    if not -1e300 < value < 1e300:  # false for NaN too
        raise ValueError("a finite number")
    return float(value)


def as_strength(value: Any) -> float:
    if abs(as_number(value)) > STRONGEST:
        raise ValueError(f"a number from {-STRONGEST:.0f} to {STRONGEST:.0f}")
    return float(value)


def as_factor(value: Any) -> float:
    if not 1 / STRONGEST <= as_number(value) <= STRONGEST:
        raise ValueError(f"a number from {1 / STRONGEST:g} to {STRONGEST:.0f}")
    return float(value)


def as_layer_count(value: Any) -> int:
    if as_size(value) > MOST_LAYERS:
        raise ValueError(f"a positive integer, at most {MOST_LAYERS}")
    return int(value)


def as_context(value: Any) -> int:
    if as_size(value) > MOST_TOKENS:
        raise ValueError(f"a positive integer, at most {MOST_TOKENS}")
    return int(value)


def as_flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError("true or false")
    return value


def as_text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError("a string")
    return value


def as_object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise TypeError("an object")
    return value


def as_objects(value: Any) -> list[dict[str, Any]]:
    if not isinstance(value, list):
        raise TypeError("a list of objects")
    return [as_object(item) for item in value]


def as_token_ids(value: Any) -> tuple[int, ...]:
    values = value if isinstance(value, list) else [value]
    try:
        return tuple(as_token_id(item) for item in values)
    except (TypeError, ValueError):
        raise TypeError("a token id or a list of token ids") from None


def as_texts(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise TypeError("a list of strings")
    return tuple(as_text(item) for item in value)


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object in `path`.

    Raises:
        ConfigError: no such file, not UTF-8, not JSON, or not an object.
    """
    try:
        require_file(path)
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path.parent} has no {path.name}: pass a model's folder") from None
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read ({error.strerror}): check the file and its permissions"
        ) from None
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, numbers without end
        raise ConfigError(f"{path} is not valid JSON ({error}): download it again") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path} holds no JSON object: download it again")
    return values
