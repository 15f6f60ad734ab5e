"""What a trace says about routing: the numbers that a cache for experts lives on.

All are means over layers and over the forwards or pairs they speak of; None = there are none.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clover_local.residency.demand import FloatArray
from clover_local.residency.trace import Forward, RoutingTrace

Counted = NDArray[np.uint16]


@dataclass(frozen=True)
class RoutingStatistics:
    """Experts are distinct ones a layer; `alike` is the cosine of rows by expert."""

    blocks: int
    previews_per_block: float
    experts_first: float | None
    """Of a block's first preview."""
    experts_later: float | None
    experts_commit: float | None
    experts_block: float | None
    """Of all forwards of a block together."""
    experts_prompt: float | None
    alike_passes: float | None
    """Adjacent previews of a block."""
    new_later: float | None
    """Experts of a later preview that the block has not used before."""
    new_commit: float | None
    """The same of its commit."""
    again_block: float | None
    """Share of a block's experts that the block before it used; of one run only."""
    again_first: float | None
    """Share of a first preview's experts that the first preview before it used."""
    experts_masks: float | None
    """Used by masked rows, of previews that have text rows too."""
    experts_text: float | None
    alike_masks_text: float | None
    alike_prompt_answer: float | None
    """A prompt and the commits that follow it."""
    share_top_quarter: float
    """Share of all uses that go to the most used quarter of a layer's experts."""
    share_top_half: float


def statistics(trace: RoutingTrace) -> RoutingStatistics:
    """The statistics of a trace."""
    blocks = _blocks(trace.forwards)
    runs = list(_runs(trace.forwards))
    previews = [[f for f in block if f.kind == "preview"] for block in blocks]
    firsts = [block[0] for block in previews if block]
    commits = [block[-1] for block in blocks if block[-1].kind == "commit"]
    mixed = [f for block in previews for f in block if _is_mixed(f)]
    uses = np.zeros((trace.layers, trace.experts))
    for forward in (f for block in blocks for f in block):
        uses += forward.rows > 0
    top = np.sort(uses, axis=1)[:, ::-1].cumsum(axis=1) / uses.sum(axis=1, keepdims=True)
    return RoutingStatistics(
        blocks=len(blocks),
        previews_per_block=sum(map(len, previews)) / len(blocks),
        experts_first=_mean(_experts(f.rows) for f in firsts),
        experts_later=_mean(_experts(f.rows) for block in previews for f in block[1:]),
        experts_commit=_mean(_experts(f.rows) for f in commits),
        experts_block=_mean(_experts(_union(block)) for block in blocks),
        experts_prompt=_mean(_experts(f.rows) for f in trace.forwards if f.kind == "prompt"),
        alike_passes=_mean(alike(a.rows, b.rows) for each in previews for a, b in pairwise(each)),
        new_later=_mean(_new(block, kind="preview") for block in blocks),
        new_commit=_mean(_new(block, kind="commit") for block in blocks),
        again_block=_mean(
            _again(_union(a), _union(b)) for run in runs for a, b in pairwise(_blocks(run))
        ),
        again_first=_mean(_again(a.rows, b.rows) for a, b in pairwise(firsts)),
        experts_masks=_mean(_experts(_masked(f)) for f in mixed),
        experts_text=_mean(_experts(f.rows - _masked(f)) for f in mixed),
        alike_masks_text=_mean(alike(_masked(f), f.rows - _masked(f)) for f in mixed),
        alike_prompt_answer=_mean(_prompt_answer(run) for run in runs),
        share_top_quarter=float(top[:, trace.experts // 4 - 1].mean()),
        share_top_half=float(top[:, trace.experts // 2 - 1].mean()),
    )


def _blocks(forwards: Iterable[Forward]) -> list[list[Forward]]:
    """Previews and commits by block."""
    found: dict[int, list[Forward]] = {}
    for forward in forwards:
        if forward.kind != "prompt":
            found.setdefault(forward.block, []).append(forward)
    return list(found.values())


def _runs(forwards: Iterable[Forward]) -> Iterator[list[Forward]]:
    """Forwards from one prompt up to the next."""
    run: list[Forward] = []
    for forward in forwards:
        if forward.kind == "prompt" and any(each.kind != "prompt" for each in run):
            yield run
            run = []
        run.append(forward)
    yield run


def _experts(rows: Counted) -> float:
    return float((rows > 0).sum(axis=1).mean())


def _union(block: Sequence[Forward]) -> Counted:
    """1 for every expert that a forward of the block uses."""
    union = np.zeros(block[0].rows.shape, np.uint16)
    for forward in block:
        union[forward.rows > 0] = 1
    return union


def alike(one: NDArray[np.integer[Any]], other: NDArray[np.integer[Any]]) -> float:
    """Cosine of two forwards' rows by expert [L, E], the mean over layers."""
    a, b = one.astype(float), other.astype(float)
    norms = np.sqrt((a * a).sum(axis=1) * (b * b).sum(axis=1))
    return float(((a * b).sum(axis=1) / np.maximum(norms, 1e-9)).mean())


def _again(before: Counted, now: Counted) -> float:
    used = now > 0
    return float((((before > 0) & used).sum(axis=1) / used.sum(axis=1)).mean())


def _new(block: list[Forward], *, kind: str) -> float | None:
    """Mean over the block's forwards of that kind, its first one left out."""
    found = []
    seen = block[0].rows > 0
    for forward in block[1:]:
        used = forward.rows > 0
        if forward.kind == kind:
            found.append(_experts((used & ~seen).astype(np.uint16)))
        seen = seen | used
    return _mean(found)


def _is_mixed(forward: Forward) -> bool:
    masked = _masked(forward)
    return bool(masked.any()) and bool((forward.rows > masked).any())


def _masked(forward: Forward) -> Counted:
    return np.zeros_like(forward.rows) if forward.masked is None else forward.masked


def _prompt_answer(run: list[Forward]) -> float | None:
    prompt = [f.rows.astype(np.int64) for f in run if f.kind == "prompt"]
    answer = [f.rows.astype(np.int64) for f in run if f.kind == "commit"]
    if not prompt or not answer:
        return None
    return alike(np.sum(prompt, axis=0), np.sum(answer, axis=0))


def _mean(values: Iterable[float | None]) -> float | None:
    known: FloatArray = np.array([value for value in values if value is not None])
    return float(known.mean()) if len(known) else None
