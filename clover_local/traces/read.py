"""The reader of traces that `--trace` wrote: runs, and of each the forwards that picked tokens.

Needs no torch. `residency/trace.py` reads the routing out of the same file.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from clover_local.decoding.keys import SINGLE_MODES
from clover_local.errors import TraceError
from clover_local.files import (
    as_flag,
    as_integer,
    as_number,
    as_object,
    as_size,
    as_text,
    as_token_id,
    require_file,
)

ENDED = ("stop", "length", "context", "repetition")
"""Finish reasons of a run that came to its end by itself."""


@dataclass(frozen=True)
class PickedRow:
    """A row that got a token."""

    row: int
    token: int
    confidence: float
    reason: str
    top: tuple[tuple[int, float], ...]  # the likeliest tokens with their probabilities


@dataclass(frozen=True)
class Step:
    """One forward that picked tokens: a pass, or the verify of a round."""

    kind: str  # pass or verify
    mode: str
    block: int
    start: int
    number: int  # of the pass in its block, from 0
    before: tuple[int, ...]  # the block before the pass; the rows that a verify read
    picked: tuple[PickedRow, ...]
    milliseconds: float
    accepted: int = 0  # drafts that a verify accepted
    coreset_sizes: tuple[int, ...] = ()  # by layer
    controls: Mapping[str, Any] = field(default_factory=dict)

    @property
    def choice(self) -> tuple[object, ...]:
        """All that an equal run has in common with it: its place, rows and tokens."""
        pairs = tuple((row.row, row.token) for row in self.picked)
        place = (self.kind, self.mode, self.block, self.start, self.number, self.before)
        return (*place, self.accepted, pairs)


@dataclass(frozen=True)
class Choice:
    """What `auto` went on with before a step, and why."""

    before_step: int  # index of a step of the run
    mode: str
    is_probe: bool
    why: str


@dataclass(frozen=True)
class Header:
    """What a run was asked to do."""

    model: str  # empty: the trace does not say
    model_hash: str
    prompt_ids: tuple[int, ...]
    context: int
    device: str
    dtype: str | None
    settings: Mapping[str, Any]
    versions: Mapping[str, Any]


@dataclass
class RecordedRun:
    """One run of a trace; a run that was cut off has no finish reason."""

    header: Header
    steps: list[Step] = field(default_factory=list)
    choices: list[Choice] = field(default_factory=list)
    stats: Mapping[str, Any] = field(default_factory=dict)
    finish_reason: str | None = None
    token_ids: tuple[int, ...] = ()
    commit_milliseconds: float = 0.0  # of the answer's tokens; those of the prompt do not count

    @property
    def ended(self) -> bool:
        """Whether it came to its end by itself."""
        return self.finish_reason in ENDED


def read_runs(path: Path) -> list[RecordedRun]:
    """The runs of a trace, in order; a last line that a stop cut off is left out.

    Raises:
        TraceError: no such file, no trace, or a damaged line.
    """
    runs: list[RecordedRun] = []
    try:
        require_file(path)
        with path.open(encoding="utf-8") as file:
            for line, text in enumerate(file, start=1):
                if runs and _is_cut(text):
                    break
                with _naming(path, line):
                    _add(runs, as_object(json.loads(text)))
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text"
        raise TraceError(f"{path} cannot be read ({why}): pass a file that --trace wrote") from None
    if not runs:
        raise TraceError(f"{path} is empty: record it anew with `generate --trace FILE`")
    return runs


def _is_cut(line: str) -> bool:
    """Whether a stop kept the writer from its end: each record is one line."""
    if line.endswith("\n"):
        return False
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return True
    return False


def step_of(record: Mapping[str, Any]) -> Step:
    """A record of a pass or a verify.

    Raises:
        KeyError, TypeError, ValueError: the record is damaged.
    """
    is_pass = record["record"] == "pass"
    return Step(
        kind="pass" if is_pass else "verify",
        mode=_mode(record["mode"]),
        block=as_integer(record["block"]),
        start=as_integer(record["start"]),
        number=as_integer(record["pass"]) if is_pass else 0,
        before=_ids(record["block_before" if is_pass else "tokens"]),
        picked=tuple(map(_picked, record["fixed"])),
        milliseconds=as_number(record["milliseconds"]),
        accepted=0 if is_pass else as_integer(record["accepted"]),
        coreset_sizes=tuple(map(as_integer, record.get("coreset_sizes", ()))),
        controls=as_object(record["controls"]),
    )


def _add(runs: list[RecordedRun], record: Mapping[str, Any]) -> None:
    kind = as_text(record["record"])
    if kind == "header":
        runs.append(RecordedRun(_header(record)))
    elif not runs:
        raise ValueError("no header before it")
    elif kind in ("pass", "verify"):
        runs[-1].steps.append(step_of(record))
    elif kind == "end":
        runs[-1].finish_reason = as_text(record["finish_reason"])
        runs[-1].token_ids = _ids(record["token_ids"])
        runs[-1].stats = as_object(record["stats"])
    elif kind == "choice":
        runs[-1].choices.append(_choice(record, before_step=len(runs[-1].steps)))
    elif kind == "commit":
        if as_text(record["of"]) == "answer":
            runs[-1].commit_milliseconds += as_number(record["milliseconds"])
    else:
        raise ValueError(f"a record of an unknown kind {kind!r}")


def _choice(record: Mapping[str, Any], *, before_step: int) -> Choice:
    return Choice(
        before_step=before_step,
        mode=_mode(record["mode"]),
        is_probe=as_flag(record["is_probe"]),
        why=as_text(record["why"]),
    )


def _mode(value: Any) -> str:
    mode = as_text(value)
    if mode not in SINGLE_MODES:
        raise ValueError(f"the mode {mode!r}")
    return mode


def _header(record: Mapping[str, Any]) -> Header:
    dtype = record.get("dtype")
    return Header(
        model=as_text(record.get("model", "")),
        model_hash=as_text(record["model_hash"]),
        prompt_ids=_ids(record["prompt_ids"]),
        context=as_size(record["context"]),
        device=as_text(record["device"]),
        dtype=None if dtype is None else as_text(dtype),
        settings=as_object(record["settings"]),
        versions=as_object(record["versions"]),
    )


def _picked(item: Mapping[str, Any]) -> PickedRow:
    return PickedRow(
        row=as_integer(item["row"]),
        token=as_token_id(item["token"]),
        confidence=as_number(item["confidence"]),
        reason=as_text(item["reason"]),
        top=tuple((as_token_id(token), as_number(share)) for token, share in item["top"]),
    )


def _ids(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list):
        raise TypeError("a list of token ids")
    return tuple(map(as_token_id, value))


@contextmanager
def _naming(path: Path, line: int) -> Iterator[None]:
    """Says where a damaged record stands."""
    try:
        yield
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        if isinstance(error, UnicodeDecodeError):
            raise
        why = f"without {error}" if isinstance(error, KeyError) else f"not as expected: {error}"
        raise TraceError(
            f"{path}, line {line} is no record of a trace ({why}): pass what --trace wrote, "
            "without a last line that a stop cut off"
        ) from None
