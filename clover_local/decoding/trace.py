"""Trace of a run as JSON lines: enough to run it again and find the first pass that differs.

A header, then one record a forward in order, then an `end` record; a conversation appends its
runs. Lines are flushed one by one, so an interrupted run leaves whole records.
"""

import importlib.metadata
import json
import platform
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Protocol

import torch

from clover_local.decoding.controls import Controls
from clover_local.decoding.pick import RowStatistics
from clover_local.decoding.settings import Settings
from clover_local.errors import SettingsError

_HEADER = b'{"record": "header"'


class TraceSink(Protocol):
    """Whatever hears the records of a run."""

    @property
    def model(self) -> str:
        """Where the model lies, for a header; empty: nowhere."""

    @property
    def model_hash(self) -> str:
        """What tells the model from others."""

    def write(self, record: Mapping[str, object]) -> None:
        """Takes one record."""


class Trace:
    """An open trace file; a context manager."""

    def __init__(self, path: Path, *, model_hash: str, model: str = "") -> None:
        """Opens `path`; a trace that is there stays until the first record takes its place.

        `model` says where the model lies.

        Raises:
            SettingsError: the path cannot be written, or holds something else.
        """
        self.path = path
        self.model = model
        self.model_hash = model_hash
        self._is_empty = True
        try:
            _refuse_other_file(path)
            self._is_new = not path.exists()
            self._file = path.open("a", encoding="utf-8")
        except OSError as error:
            raise self._unwritable(error) from None

    def write(self, record: Mapping[str, object]) -> None:
        """Appends one record; after `close` it does nothing, as an abandoned run may end later.

        Raises:
            SettingsError: the disk is full or gone.
        """
        if self._file.closed:
            return
        try:
            if self._is_empty and self.path.is_file():
                self._file.truncate(0)
            self._is_empty = False
            self._file.write(json.dumps(record, allow_nan=False) + "\n")
            self._file.flush()
        except OSError as error:
            raise self._unwritable(error) from None

    def close(self) -> None:
        """Closes the file, and leaves none behind without a record; twice is fine."""
        with suppress(OSError):  # every record was flushed, or `write` has said why not
            if not self._file.closed and self._is_empty and self._is_new:
                self.path.unlink()
            self._file.close()

    def __enter__(self) -> "Trace":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _unwritable(self, error: OSError) -> SettingsError:
        return SettingsError(
            f"the trace {self.path} cannot be written ({error.strerror}): pass another --trace FILE"
        )


def _refuse_other_file(path: Path) -> None:
    """A mistyped name must not cost a prompt or a model."""
    if path.is_file():
        with path.open("rb") as file:
            if not _HEADER.startswith(file.read(len(_HEADER))):
                raise SettingsError(
                    f"{path} exists and is no trace: remove it, or pass another --trace FILE"
                )


def header_record(
    sink: TraceSink,
    settings: Settings,
    *,
    prompt_ids: Sequence[int],
    reused_tokens: int,
    context: int,
    device: torch.device,
    dtype: torch.dtype,
) -> dict[str, object]:
    """What is needed to run it again."""
    try:
        own = importlib.metadata.version("clover-local")
    except importlib.metadata.PackageNotFoundError:
        own = "unknown"
    return {
        "record": "header",
        "model": sink.model,
        "model_hash": sink.model_hash,
        "prompt_ids": list(prompt_ids),
        "reused_tokens": reused_tokens,
        "context": context,
        "settings": asdict(settings),
        "seed": settings.seed,
        "versions": {
            "clover_local": own,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "device": str(device),
        "dtype": str(dtype).removeprefix("torch."),
    }


def pass_record(
    statistics: RowStatistics,
    controls: Controls,
    *,
    mode: str,
    block: int,
    start: int,
    pass_number: int,
    block_before: Sequence[int],
    rows: Sequence[int],
    reasons: Sequence[str],
    coresets: Sequence[int],
    milliseconds: float,
    routing: dict[str, object] | None,
) -> dict[str, object]:
    """One forward that picked tokens; `routing` as in `residency/trace.py`.

    `rows` and `reasons` belong to the rows of `statistics`; one with reason "" was not fixed.
    """
    return {
        "record": "pass",
        "mode": mode,
        "block": block,
        "start": start,
        "pass": pass_number,
        "block_before": list(block_before),
        "controls": controls.describe(),
        "fixed": _fixed(statistics, rows=rows, reasons=reasons),
        "coreset_sizes": list(coresets),
        "milliseconds": milliseconds,
        **({} if routing is None else {"routing": routing}),
    }


def verify_record(
    statistics: RowStatistics,
    controls: Controls,
    *,
    block: int,
    start: int,
    tokens: Sequence[int],
    reasons: Sequence[str],
    accepted: int,
    milliseconds: float,
    routing: dict[str, object] | None,
) -> dict[str, object]:
    """One causal forward over a pending token and drafts, of the round `block`.

    `statistics` and `reasons` are of the accepted drafts and the boundary token. Row r of `fixed`
    is what row r of the forward predicts.
    """
    return {
        "record": "verify",
        "mode": "draft",
        "block": block,
        "start": start,
        "tokens": list(tokens),
        "controls": controls.describe(),
        "accepted": accepted,
        "fixed": _fixed(statistics, rows=range(len(reasons)), reasons=reasons),
        "milliseconds": milliseconds,
        **({} if routing is None else {"routing": routing}),
    }


def _fixed(
    statistics: RowStatistics, *, rows: Sequence[int], reasons: Sequence[str]
) -> list[dict[str, object]]:
    """The rows that got a token, each with why and with what else was likely."""
    return [
        {
            "row": row,
            "token": int(statistics.token[i]),
            "confidence": float(statistics.confidence[i]),
            "reason": reasons[i],
            "top": [
                [token, probability]
                for token, probability in zip(
                    statistics.top_ids[i].tolist(),
                    statistics.top_probabilities[i].tolist(),
                    strict=True,
                )
            ],
        }
        for i, row in enumerate(rows)
        if reasons[i]
    ]


def commit_record(
    tokens: Sequence[int],
    *,
    start: int,
    prompt: bool,
    milliseconds: float,
    routing: dict[str, object] | None,
) -> dict[str, object]:
    """One causal forward; `routing` as in `residency/trace.py`."""
    return {
        "record": "commit",
        "of": "prompt" if prompt else "answer",
        "start": start,
        "tokens": list(tokens),
        "milliseconds": milliseconds,
        **({} if routing is None else {"routing": routing}),
    }


def choice_record(*, mode: str, is_probe: bool, at: int, why: str) -> dict[str, object]:
    """That `auto` goes on with `mode` behind `at` tokens of the answer."""
    return {"record": "choice", "mode": mode, "is_probe": is_probe, "at": at, "why": why}


def end_record(
    finish_reason: str, token_ids: Sequence[int], stats: Mapping[str, object]
) -> dict[str, object]:
    """The last record of a run, also of an interrupted one."""
    return {
        "record": "end",
        "finish_reason": finish_reason,
        "token_ids": list(token_ids),
        "stats": dict(stats),
    }
