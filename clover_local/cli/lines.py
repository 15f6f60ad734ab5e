"""Questions from lines of text: one a line, or several lines between triple double quotes."""

from collections.abc import Iterator
from typing import BinaryIO

from clover_local.cli.prompts import decode

QUOTES = '"""'


def unquote(text: str) -> str | None:
    """The question in `text`; None when its triple quotes are still open."""
    stripped = text.strip()
    if not stripped.startswith(QUOTES):
        return text
    if len(stripped) < 2 * len(QUOTES) or not stripped.endswith(QUOTES):
        return None
    return stripped[len(QUOTES) : -len(QUOTES)].strip("\n")


def questions(stream: BinaryIO) -> Iterator[str]:
    """The questions in a pipe, in order; quotes that are open at its end are closed there.

    Raises:
        SettingsError: a line that is no UTF-8.
    """
    pending = ""
    for line in stream:
        pending += decode(line, "stdin")
        question = unquote(pending)
        if question is not None:
            yield question.rstrip("\r\n")
            pending = ""
    if pending:
        yield pending.strip().removeprefix(QUOTES).strip("\n")
