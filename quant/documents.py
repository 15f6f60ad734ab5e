"""Texts for calibration and evaluation: files of chats, bundled or the user's own.

    === A TITLE
    >>> tools
    [{"type": "function", ...}]
    >>> user
    text
    >>> assistant
    text

A line `=== TITLE` starts a document, a line `>>> ROLE` a message; `tools` holds a JSON list of tool
schemas. A file without such lines is plain text, cut at paragraph ends into answers of the model.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import resources
from importlib.resources.abc import Traversable
from itertools import pairwise
from pathlib import Path
from typing import Any

from clover_local.errors import CloverError
from clover_local.files import require_file
from clover_local.hub import DEMO, locate
from clover_local.tokenizer import Message, Tokenizer

ROLES = ("system", "user", "assistant", "tool")
TOOLS = "tools"
DEMO_TASKS = "demo_tasks.txt"
PLAIN_PROMPT = "Write on."
PLAIN_CHARACTERS = 4000  # of one piece of a plain text

_TITLE = re.compile(r"^=== *(.*?)\s*$", re.MULTILINE)
_MARKER = re.compile(r"^>>> *(.*?)\s*$", re.MULTILINE)


@dataclass(frozen=True)
class Document:
    """One chat; `kind` is the name of its file without the ending."""

    title: str
    kind: str
    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()


def read_documents(path: Path | None, tokenizer: Tokenizer) -> tuple[Document, ...]:
    """The documents of a file; None: those that the package brings for calibration.

    Args:
        tokenizer: the model's. One of the demo model's vocabulary knows nothing but the demo's
            tasks, and gets those of the bundled texts; any other gets all others.

    Raises:
        CloverError: a file that cannot be read, is empty or not UTF-8, or breaks the format.
    """
    if path is None:
        return _bundled("", tokenizer)
    try:
        require_file(path)
        data = path.read_bytes()
    except OSError as error:
        raise CloverError(
            f"{path} cannot be read ({error.strerror}): pass a text file in UTF-8"
        ) from None
    return parse_documents(data, source=str(path), kind=path.stem)


def held_out_documents(tokenizer: Tokenizer) -> tuple[Document, ...]:
    """The bundled documents for evaluation; none of them serves calibration."""
    return _bundled("held_out", tokenizer)


def knows_demo_tasks(tokenizer: Tokenizer) -> bool:
    """Whether a tokenizer has the vocabulary of the bundled demo model."""
    return tokenizer.vocabulary == Tokenizer.load(locate(DEMO)).vocabulary


def parse_documents(data: bytes, *, source: str, kind: str) -> tuple[Document, ...]:
    """The documents in the bytes of a file; `source` names it in errors.

    Raises:
        CloverError: empty, not UTF-8, or not in the format.
    """
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise CloverError(
            f"{source} is not UTF-8 at byte {error.start}: pass a text file in UTF-8"
        ) from None
    text = text.replace("\r\n", "\n")
    if not text.strip():
        raise CloverError(f"{source} is empty: pass a file with text")
    if not _TITLE.search(text) and not _MARKER.search(text):
        return tuple(
            Document(f"piece {number}", kind, _answer(piece))
            for number, piece in enumerate(_pieces(text), 1)
        )
    titles = list(_TITLE.finditer(text))
    starts = [*(title.start() for title in titles), len(text)]
    documents = []
    if text[: starts[0]].strip():
        documents.append(_document(text[: starts[0]], "untitled", source=source, kind=kind))
    for title, end in zip(titles, starts[1:], strict=True):
        body = text[title.end() : end]
        documents.append(_document(body, title[1] or "untitled", source=source, kind=kind))
    return tuple(documents)


def _bundled(folder: str, tokenizer: Tokenizer) -> tuple[Document, ...]:
    """The documents of the bundled texts of a folder, files by name."""
    root: Traversable = resources.files("clover_local.calibration_data")
    files = sorted((root / folder if folder else root).iterdir(), key=lambda file: file.name)
    for_demo = knows_demo_tasks(tokenizer)
    return tuple(
        document
        for file in files
        if file.name.endswith(".txt") and (file.name == DEMO_TASKS) == for_demo
        for document in parse_documents(
            file.read_bytes(), source=file.name, kind=file.name.removesuffix(".txt")
        )
    )


def _document(body: str, title: str, *, source: str, kind: str) -> Document:
    markers = list(_MARKER.finditer(body))
    where = f"{source}: document {title!r}"
    if body[: markers[0].start() if markers else None].strip():
        raise CloverError(f"{where} has text before its first message: begin it with `>>> user`")
    messages: list[Message] = []
    tools: tuple[Mapping[str, Any], ...] | None = None
    ends = [*(marker.start() for marker in markers), len(body)][1:]
    for marker, end in zip(markers, ends, strict=True):
        content = body[marker.end() : end].strip("\n")
        if marker[1] == TOOLS:
            if tools is not None:
                raise CloverError(f"{where} has `>>> tools` twice: put all schemas into one list")
            tools = _tools(content, where)
        elif marker[1] in ROLES:
            messages.append({"role": marker[1], "content": content})
        else:
            raise CloverError(
                f"{where} has the role {marker[1]!r}: use {', '.join((*ROLES, TOOLS))}"
            )
    if not messages:
        raise CloverError(f"{where} has no message: write one under `>>> user`")
    return Document(title, kind, tuple(messages), tools or ())


def _tools(content: str, where: str) -> tuple[Mapping[str, Any], ...]:
    try:
        tools = json.loads(content)
    except ValueError:
        tools = None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise CloverError(f"{where}: `>>> tools` is no JSON list of tool schemas: write one there")
    return tuple(tools)


def _answer(text: str) -> tuple[Message, ...]:
    return (
        {"role": "user", "content": PLAIN_PROMPT},
        {"role": "assistant", "content": text},
    )


def _pieces(text: str) -> Iterator[str]:
    """Whole paragraphs of together about `PLAIN_CHARACTERS`; a longer one stands alone."""
    ends = [match.end() for match in re.finditer(r"\n\s*\n", text)]
    start = 0
    for end, following in pairwise([*ends, len(text), len(text)]):
        if following - start > PLAIN_CHARACTERS or end == len(text):
            if text[start:end].strip():
                yield text[start:end].strip("\n")
            start = end
