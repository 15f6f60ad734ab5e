"""Draws an evaluation: KL by layer, and how evenly the experts of each layer were used."""

from pathlib import Path
from typing import TYPE_CHECKING

from clover_local.quant.evaluation.result import Evaluation

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def draw(evaluation: Evaluation, path: Path) -> None:
    """Writes the chart to `path`, as PNG or SVG by its ending."""
    from matplotlib.figure import Figure

    has_layers = evaluation.comparison is not None and evaluation.comparison.kl_by_layer
    figure = Figure(figsize=(10 if has_layers else 5.5, 4), layout="constrained")
    panels = figure.subplots(1, 2 if has_layers else 1, squeeze=False)[0]
    figure.suptitle(_title(evaluation))
    if evaluation.comparison is not None and has_layers:
        _kl_by_layer(panels[0], evaluation.comparison.kl_by_layer)
    _tokens_per_expert(panels[-1], evaluation.model.tokens_per_expert)
    figure.savefig(path, dpi=150)


def _title(evaluation: Evaluation) -> str:
    against = f" against {evaluation.reference.name}" if evaluation.reference else ""
    return f"{evaluation.model.name}{against}, {evaluation.tokens} tokens"


def _kl_by_layer(axes: "Axes", kl_by_layer: tuple[float, ...]) -> None:
    axes.plot(range(len(kl_by_layer)), kl_by_layer, marker="o", markersize=3)
    axes.set(xlabel="layer whose output the head reads", ylabel="KL in nats", ylim=(0, None))
    axes.grid(alpha=0.3)


def _tokens_per_expert(axes: "Axes", tokens_per_expert: tuple[tuple[int, ...], ...]) -> None:
    """Least, median and most used expert of each layer, as shares of an even use."""
    layers = range(len(tokens_per_expert))
    ranked = [sorted(counts) for counts in tokens_per_expert]
    even = [sum(counts) / len(counts) for counts in ranked]
    for name, place in (("most used", -1), ("median", None), ("least used", 0)):
        shares = [
            counts[len(counts) // 2 if place is None else place] / mean
            for counts, mean in zip(ranked, even, strict=True)
        ]
        axes.plot(layers, shares, marker="o", markersize=3, label=name)
    axes.axhline(1, linewidth=0.8, color="grey")
    axes.set(xlabel="layer", ylabel="rows of an expert / even share", ylim=(0, None))
    axes.legend()
    axes.grid(alpha=0.3)
