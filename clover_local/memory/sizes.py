"""Bytes and rates as text: `15360MiB`, `16GB`, `52GB/s`."""

import re
import reprlib

from clover_local.errors import SettingsError

MIB = 1 << 20
GIB = 1 << 30

_LONGEST = 20  # characters
_SIZE = re.compile(r"(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>[kmgt])(?P<binary>i?)b?", re.IGNORECASE)
_COUNT = re.compile(r"(\d+)\s*b?", re.IGNORECASE)
_POWERS = {"k": 1, "m": 2, "g": 3, "t": 4}


def parse_size(text: str, flag: str) -> int:
    """Bytes in `15360MiB`, `14.5 GiB`, `16GB`, `2G`; without an i a unit is decimal.

    Raises:
        SettingsError: no size; `flag` names where it was given.
    """
    return _parsed(text, flag, base=1000, example="16GB or 15360MiB")


def parse_bytes(text: str, flag: str) -> int:
    """As `parse_size`, where a number without a unit is bytes: `838860800`.

    Raises:
        SettingsError: no size; `flag` names where it was given.
    """
    count = _COUNT.fullmatch(text.strip()) if len(text) <= _LONGEST else None
    return parse_size(text, flag) if count is None else int(count[1])


def parse_capacity(text: str, flag: str) -> int:
    """Bytes of a card or of memory modules, whose makers count in GiB and write GB.

    Raises:
        SettingsError: no size; `flag` names where it was given.
    """
    return _parsed(text, flag, base=1024, example="16GB or 15360MiB")


def parse_rate(text: str, flag: str) -> float:
    """Bytes a second in `52GB/s`.

    Raises:
        SettingsError: no rate; `flag` names where it was given.
    """
    amount, per, second = text.partition("/")
    unit = amount if per and second.strip() == "s" else ""
    return float(_parsed(unit, flag, base=1000, example="52GB/s", given=text, what="rate"))


def shown(nbytes: float) -> str:
    """A number of bytes for a table: `1.62 MB`, in decimal units."""
    amount, unit = float(nbytes), "B"
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if amount < 999.5 or unit == "TB":
            break
        amount /= 1000
    digits = 0 if unit == "B" else 2 if amount < 99.995 else 0
    return f"{amount:.{digits}f} {unit}"


def shown_rate(rate: float) -> str:
    """Bytes a second for a table: `52 GB/s`, `1.5 MB/s`, in decimal units."""
    amount, unit = rate, "B"
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if amount < 999.5 or unit == "TB":
            break
        amount /= 1000
    return f"{amount:.3g} {unit}/s"


def shown_mib(nbytes: int) -> str:
    """As flags take it, rounded up to whole MiB."""
    return f"{-(-nbytes // MIB)}MiB"


def _parsed(
    text: str, flag: str, *, base: int, example: str, given: str = "", what: str = "size"
) -> int:
    match = _SIZE.fullmatch(text.strip()) if len(text) <= _LONGEST else None
    if match is None:
        raise SettingsError(
            f"{flag} {reprlib.repr(given or text)} is no {what}: "
            f"use a number with a unit, such as {example}"
        )
    power = _POWERS[match["unit"].lower()]
    return int(float(match["number"]) * (1024 if match["binary"] else base) ** power)
