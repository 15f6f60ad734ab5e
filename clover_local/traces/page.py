"""A trace as a page: block by block, pass by pass, one HTML file that needs no network.

The data lie in the page as JSON; its script builds a block when it is looked at, so that a long
trace opens at once. Nothing but that script may run (Content-Security-Policy with its hash).
"""

import base64
import hashlib
import json
from collections.abc import Iterator, Sequence
from importlib import resources
from pathlib import Path

from clover_local.decoding.settings import Settings
from clover_local.errors import TraceError
from clover_local.files import replacing, require_file
from clover_local.traces.payload import DEFAULTS, Decode, payload
from clover_local.traces.read import RecordedRun

SCRIPTS = ("words.js", "cells.js", "stage.js", "report.js")
"""One script in this order: each file uses what those before it define."""
START = "<!doctype html><!-- clover-local report -->"


def page(
    runs: Sequence[RecordedRun], decode: Decode | None, *, usual: Settings = DEFAULTS
) -> Iterator[str]:
    """The page, piece by piece; arguments as of `payload`."""
    script, style = "".join(map(_resource, SCRIPTS)), _resource("report.css")
    policy = f"default-src 'none'; style-src 'sha256-{_hash(style)}'; script-src "
    policy += f"'sha256-{_hash(script)}'"
    yield (
        f'{START}\n<html lang="en"><head><meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>clover-local report</title>\n<style>{style}</style></head>\n<body>\n"
        "<noscript>This page builds its tables with a script of its own: allow scripts for it."
        "</noscript>\n<main></main>\n"
    )
    # In a script element only "<" could end it, or begin a comment.
    data = json.dumps(payload(runs, decode, usual=usual), separators=(",", ":")).replace(
        "<", "\\u003c"
    )
    yield f'<script type="application/json" id="data">{data}</script>\n'
    yield f"<script>{script}</script>\n</body></html>\n"


def write_page(path: Path, pieces: Iterator[str]) -> None:
    """Writes a page to `path`, which may hold an earlier one.

    Raises:
        TraceError: the path holds something else, or cannot be written; nothing has changed then.
    """
    try:
        _refuse_other_file(path)
        with replacing(path) as file:
            for piece in pieces:
                file.write(piece.encode())
    except OSError as error:
        raise TraceError(
            f"{path} cannot be written ({error.strerror}): pass another name"
        ) from None


def _refuse_other_file(path: Path) -> None:
    """A mistyped name must not cost anything."""
    try:
        require_file(path)
    except FileNotFoundError:
        return
    with path.open("rb") as file:
        if file.read(len(START)) != START.encode():
            raise TraceError(f"{path} exists and is no report: remove it, or pass another name")


def _resource(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
