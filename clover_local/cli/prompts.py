"""Where the text to answer comes from: `-p TEXT`, `-f FILE`, `--prompt-ids`, or a pipe."""

import sys
from pathlib import Path

import typer

from clover_local.errors import SettingsError

LARGEST = 10_000_000
"""Bytes of a text that is read: more than any context holds, and an end for what has none."""


def read_prompt(text: str | None, *, file: Path | None, keep_newline: bool) -> str:
    """The text to answer: given, or from a file (`-` = stdin), or from a pipe to stdin.

    A newline that ends a file or a pipe is dropped unless `keep_newline`.

    Raises:
        typer.BadParameter: two sources, or none.
        SettingsError: the text is empty, too long, or no UTF-8, or cannot be read.
    """
    if text is not None and file is not None:
        raise typer.BadParameter("--prompt and --file exclude each other")
    if text is None:
        if file is None and sys.stdin.isatty():
            raise typer.BadParameter(
                "nothing to answer: pass -p TEXT, -f FILE, --prompt-ids IDS, or pipe text in"
            )
        standard_input = file is None or str(file) == "-"
        source = "stdin" if standard_input else str(file)
        try:
            if standard_input or file is None:
                content = sys.stdin.buffer.read(LARGEST + 1)
            else:
                with file.open("rb") as stream:
                    content = stream.read(LARGEST + 1)
        except OSError as error:
            raise SettingsError(
                f"{source} cannot be read ({error.strerror or error}): pass another prompt"
            ) from None
        if len(content) > LARGEST:
            raise SettingsError(f"{source} has more than {LARGEST:,} bytes: pass a shorter prompt")
        text = decode(content, source)
        text = text if keep_newline else text.rstrip("\r\n")
    if not text.strip():
        raise SettingsError("the prompt is empty: pass some text")
    return text


def decode(content: bytes, source: str) -> str:
    """`content` as UTF-8, a byte order mark dropped.

    Raises:
        SettingsError: it is no UTF-8.
    """
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise SettingsError(
            f"{source} is not UTF-8 (byte {error.start}): convert it first, e.g. with iconv"
        ) from None


def parse_ids(text: str, *, flag: str) -> tuple[int, ...]:
    """Token ids such as `1,2,3`.

    Raises:
        SettingsError: something else, or nothing.
    """
    try:
        ids = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise SettingsError(
            f"{flag} takes token ids with commas between them, such as 1,2,3, not {text!r}"
        ) from None
    if min(ids) < 0:
        raise SettingsError(f"{flag}: {min(ids)} is no token id: ids are 0 or more")
    return ids


def messages(question: str, *, system: str | None) -> list[dict[str, str]]:
    """The conversation that asks one question."""
    asked = [{"role": "user", "content": question}]
    return [{"role": "system", "content": system}, *asked] if system else asked
