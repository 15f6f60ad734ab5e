"""Draws a simulation: hit rates and misses by cache size, a line for every policy."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from clover_local.residency.simulate import Replay

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def draw(replays: Sequence[Replay], path: Path, *, title: str) -> None:
    """Writes the chart to `path`, as PNG or SVG by its ending."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    rates, misses = figure.subplots(1, 2)
    figure.suptitle(title)
    for policy in dict.fromkeys(each.policy for each in replays):
        own = sorted((r for r in replays if r.policy == policy), key=lambda r: r.share)
        sizes = [100 * each.share for each in own]
        hits = [_percent_hit(each) for each in own]
        rates.plot(sizes, hits, marker="o", markersize=3, label=policy)
        misses.plot(
            sizes, [each.misses_per_block for each in own], marker="o", markersize=3, label=policy
        )
    _belady(misses, replays)
    rates.set(xlabel="slots, % of all experts", ylabel="previews and commits: hits, %")
    misses.set(xlabel="slots, % of all experts", ylabel="misses a block", ylim=(0, None))
    for axes in (rates, misses):
        axes.legend()
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=150)


def _belady(axes: "Axes", replays: Sequence[Replay]) -> None:
    by_size = sorted({each.share: each for each in replays}.values(), key=lambda each: each.share)
    axes.plot(
        [100 * each.share for each in by_size],
        [each.belady / max(each.blocks, 1) for each in by_size],
        color="grey",
        linestyle="--",
        label="Belady",
    )


def _percent_hit(replay: Replay) -> float:
    decoding = [counts for phase, counts in replay.counts.items() if phase != "prompt"]
    hits = sum(counts.hits for counts in decoding)
    asked = hits + sum(counts.misses for counts in decoding)
    return 100 * hits / asked if asked else 0.0
