"""The routing of a run: what `--trace` records of each forward, and the reader of such a file.

A record of a forward (`pass`, `commit` or `verify`) carries under `routing`

    layers, experts   L, E
    used              base64 of L * E bits, layer by layer, lowest bit first: which experts
    rows              base64 of zlib of one little-endian uint16 for each bit set, in that order:
                      how many rows used the expert
    masked            previews only, packed like `rows`: how many of those rows held a mask

which is 5 KB a pass of the 35B model. Rows are counted, not listed: a cache sees no single rows.
"""

import base64
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from clover_local.errors import TraceError
from clover_local.residency.demand import Demand, IntArray, Kind

MOST_ROWS = 65535  # of one forward: they are counted in 16 bits
_MOST_EXPERTS = 1 << 24  # layers * experts of any model


@dataclass(frozen=True, eq=False)
class Forward:
    """The routing of one forward: rows by expert of every layer."""

    kind: Kind
    block: int
    number: int
    rows: NDArray[np.uint16]  # [L, E]
    masked: NDArray[np.uint16] | None = None  # [L, E]: of `rows`, those that held a mask

    def demands(self) -> Iterator[Demand]:
        """The demands of its layers, in order."""
        for layer, rows in enumerate(self.rows):
            experts = np.flatnonzero(rows)
            counts = rows[experts].astype(np.int64)
            yield Demand(layer, experts, counts, self.kind, self.block, self.number)


@dataclass(frozen=True, eq=False)
class RoutingTrace:
    """The forwards of one or more runs, in order."""

    layers: int
    experts: int
    forwards: tuple[Forward, ...]

    def demands(self) -> Iterator[Demand]:
        """All demands in the order in which a run makes them."""
        for forward in self.forwards:
            yield from forward.demands()


def forward_of(
    expert_ids: Sequence[ArrayLike],
    *,
    num_experts: int,
    kind: Kind,
    block: int,
    number: int,
    masked: ArrayLike | None = None,
) -> Forward:
    """The routing of a forward.

    Args:
        expert_ids: per layer [T, A], -1 where a row used fewer experts.
        masked: [T] bool: the rows of a preview that hold a mask.

    Raises:
        ValueError: an expert that does not exist, more rows than a record can count.
    """
    layers = [np.asarray(ids, dtype=np.int64) for ids in expert_ids]
    rows = np.stack([_count(ids, num_experts) for ids in layers])
    if masked is None:
        return Forward(kind, block, number, rows)
    chosen = np.asarray(masked, dtype=bool)
    return Forward(
        kind, block, number, rows, np.stack([_count(ids[chosen], num_experts) for ids in layers])
    )


def routing_record(forward: Forward) -> dict[str, object]:
    """What goes into the trace under `routing`."""
    used = forward.rows > 0
    record: dict[str, object] = {
        "layers": len(used),
        "experts": used.shape[1],
        "used": _text(np.packbits(used, bitorder="little").tobytes()),
        "rows": _packed(forward.rows[used]),
    }
    if forward.masked is not None:
        record["masked"] = _packed(forward.masked[used])
    return record


def read_routing(record: Mapping[str, Any], *, kind: Kind, block: int, number: int) -> Forward:
    """The inverse of `routing_record`.

    Raises:
        ValueError: the record is damaged.
    """
    shape = (int(record["layers"]), int(record["experts"]))
    size = shape[0] * shape[1]
    if min(shape) < 1 or size > _MOST_EXPERTS:
        raise ValueError(f"{shape[0]} layers of {shape[1]} experts")
    bits = np.frombuffer(base64.b64decode(record["used"], validate=True), np.uint8)
    if len(bits) != -(-size // 8):
        raise ValueError(f"{len(bits)} bytes for {size} bits")
    used = np.unpackbits(bits, count=size, bitorder="little").astype(bool).reshape(shape)
    rows = _unpacked(record["rows"], used)
    masked = _unpacked(record["masked"], used) if "masked" in record else None
    return Forward(kind, block, number, rows, masked)


def read_trace(path: Path) -> RoutingTrace:
    """Reads the routing out of a trace that `--trace` wrote.

    Every commit of an answer ends a block, so does the end of a run; a verify counts as a commit.

    Raises:
        TraceError: no such file, no trace, no routing in it, or a damaged line.
    """
    forwards: list[Forward] = []
    block = number = 0
    try:
        with path.open(encoding="utf-8") as file:
            for line, text in enumerate(file, start=1):
                record = _parsed(text, path=path, line=line)
                name = record["record"]
                if name in ("pass", "commit", "verify") and record.get("routing") is not None:
                    kind = _kind(record)
                    with _naming(path, line):
                        forwards.append(
                            read_routing(record["routing"], kind=kind, block=block, number=number)
                        )
                    number += kind != "prompt"
                    ends = kind == "commit"
                else:
                    ends = name == "header"
                if ends:
                    block, number = block + 1, 0
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text"
        raise TraceError(f"{path} cannot be read ({why}): pass a file that --trace wrote") from None
    if not forwards:
        raise TraceError(f"{path} has no routing: record it anew with `generate --trace FILE`")
    shapes = {forward.rows.shape for forward in forwards}
    if len(shapes) > 1:
        raise TraceError(f"{path} mixes models of {len(shapes)} shapes: record one model a file")
    layers, experts = shapes.pop()
    return RoutingTrace(layers, experts, tuple(forwards))


def _kind(record: Mapping[str, Any]) -> Kind:
    if record["record"] == "pass":
        return "preview"
    return "prompt" if record.get("of") == "prompt" else "commit"


def _parsed(text: str, *, path: Path, line: int) -> dict[str, Any]:
    try:
        record = json.loads(text)
    except (ValueError, RecursionError):
        record = None
    if not isinstance(record, dict) or not isinstance(record.get("record"), str):
        raise TraceError(
            f"{path}, line {line} is no record of a trace: pass what --trace wrote, without a last "
            "line that a stop cut off"
        )
    return record


@contextmanager
def _naming(path: Path, line: int) -> Iterator[None]:
    """Says where a damaged record stands."""
    try:
        yield
    except (ValueError, TypeError, KeyError, OverflowError, zlib.error) as error:
        raise TraceError(
            f"{path}, line {line} has damaged routing ({error}): record the trace anew"
        ) from None


def _count(ids: IntArray, num_experts: int) -> NDArray[np.uint16]:
    """Rows by expert of one layer; ids [T, A]."""
    if ids.size and not -1 <= ids.min() <= ids.max() < num_experts:
        raise ValueError(f"expert ids {ids.min()} to {ids.max()}, there are {num_experts} experts")
    if len(ids) > MOST_ROWS:
        raise ValueError(f"{len(ids)} rows in one forward, a record counts to {MOST_ROWS}")
    return np.bincount(ids.ravel() + 1, minlength=num_experts + 1)[1:].astype(np.uint16)


def _packed(counts: NDArray[np.uint16]) -> str:
    return _text(zlib.compress(counts.astype("<u2").tobytes(), 6))


def _unpacked(text: str, used: NDArray[np.bool_]) -> NDArray[np.uint16]:
    size = 2 * int(used.sum())
    unpacker = zlib.decompressobj()
    data = unpacker.decompress(base64.b64decode(text, validate=True), size + 1)
    if len(data) != size:
        raise ValueError(f"{len(data)} bytes of counts, {size} expected")
    counts = np.zeros(used.shape, np.uint16)
    counts[used] = np.frombuffer(data, "<u2")
    return counts


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")
