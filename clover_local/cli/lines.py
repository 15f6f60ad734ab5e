"""Questions from lines of text: one a line, or several lines between triple double quotes."""

from collections.abc import Callable, Iterator
from typing import BinaryIO

from clover_local.cli.prompts import LARGEST
from clover_local.errors import SettingsError

QUOTES = '"""'
BYTE_ORDER_MARK = "\ufeff"


def unquote(text: str) -> str | None:
    """The question in `text`; None when its triple quotes are still open."""
    stripped = text.strip()
    if not stripped.startswith(QUOTES):
        return text
    if len(stripped) < 2 * len(QUOTES) or not stripped.endswith(QUOTES):
        return None
    return stripped[len(QUOTES) : -len(QUOTES)].strip("\n")


def questions(stream: BinaryIO, before_line: Callable[[], None] = lambda: None) -> Iterator[str]:
    """The questions in a pipe, in order; quotes that are open at its end are closed there.

    Bytes that are no UTF-8 become surrogates, as a terminal's do: see `require_unicode`.

    Raises:
        SettingsError: a question of more than `LARGEST` bytes; no more is read.
    """
    pending = ""
    before_line()
    while line := stream.readline(LARGEST + 1):
        if len(pending) + len(line) > LARGEST:
            raise SettingsError(
                f"stdin has a question of more than {LARGEST:,} bytes, what follows was not read: "
                "shorten it"
            )
        pending += line.decode(errors="surrogateescape").removeprefix(BYTE_ORDER_MARK)
        question = unquote(pending)
        if question is not None:
            yield question.rstrip("\r\n")
            pending = ""
        before_line()
    if pending:
        yield pending.strip().removeprefix(QUOTES).strip("\n")


def require_unicode(text: str, source: str) -> None:
    """Makes sure that `text` came from UTF-8.

    Raises:
        SettingsError: it holds surrogates.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        byte = len(text[: error.start].encode())
        raise SettingsError(
            f"{source} is not UTF-8 (byte {byte}): convert it first, e.g. with iconv"
        ) from None
