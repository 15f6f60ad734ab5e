"""`clover-local evaluate`: the quality of a checkpoint, alone or against another one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from clover_local.cli import console
from clover_local.cli.options import JsonOpt, ModelArg, QuietOpt, configured, require_plot
from clover_local.quant.profiles import Choices

if TYPE_CHECKING:
    from clover_local.quant.evaluation.result import Comparison, Evaluation, ModelFigures

AgainstOpt = Annotated[
    str | None,
    typer.Option(
        metavar="MODEL",
        help="The reference, for example the source; KL is then KL(reference || MODEL).",
    ),
]
TextOpt = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Text to read; default: the bundled held-out texts."),
]
TokensOpt = Annotated[
    int, typer.Option(min=2, metavar="N", help="Tokens of the text, as far as there are so many.")
]
QuestionsOpt = Annotated[
    int,
    typer.Option(
        min=0,
        metavar="N",
        help="Questions of each kind to a model of the demo's vocabulary; 0 asks none.",
    ),
]
SeedOpt = Annotated[int, typer.Option(metavar="N", help="Seed of the choice of text and masks.")]
PlotOpt = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Draw KL and use of experts by layer: .png or .svg."),
]
DeviceOpt = Annotated[str, typer.Option(metavar="cpu|cuda", help="Where to run, in float32.")]

_FIGURES: tuple[tuple[str, Callable[[ModelFigures], float | None]], ...] = (
    ("megabytes", lambda model: model.bytes / 1e6),
    ("bits per weight", lambda model: model.bits_per_weight),
    ("perplexity, next token", lambda model: model.perplexity),
    ("perplexity, masked tokens", lambda model: model.perplexity_masked),
    ("tokens per preview, teacher-forced", lambda model: model.tokens_per_preview),
)


@configured("device")
def evaluate(
    call: typer.Context,
    model: ModelArg,
    against: AgainstOpt = None,
    text: TextOpt = None,
    tokens: TokensOpt = Choices.evaluation_tokens,
    questions: QuestionsOpt = 20,
    seed: SeedOpt = Choices.seed,
    plot: PlotOpt = None,
    device: DeviceOpt = "cpu",
    as_json: JsonOpt = False,
    quiet: QuietOpt = False,
) -> None:
    """Measure the quality of MODEL on text, and its distance from another checkpoint."""
    from clover_local.quant.documents import held_out_documents, read_documents
    from clover_local.quant.evaluation import plot as chart
    from clover_local.session import check_device, open_model

    if plot is not None:
        require_plot(plot)
    check_device(device)
    opened = open_model(model)
    reference = None if against is None else open_model(against)
    tokenizer = opened.tokenizer
    documents = read_documents(text, tokenizer) if text else held_out_documents(tokenizer)

    from clover_local.quant.evaluation import evaluate as library

    with console.progress(f"evaluating {model}") as on_progress:
        evaluation = library.evaluate(
            opened,
            against=reference,
            documents=documents,
            tokens=tokens,
            seed=seed,
            questions=questions,
            device=device,
            on_progress=on_progress,
        )
    if plot is not None:
        chart.draw(evaluation, plot)
    if as_json:
        console.print_json(evaluation.to_json())
        return
    _show(evaluation)


def _show(evaluation: Evaluation) -> None:
    models = [evaluation.model]
    if evaluation.reference is not None:
        models.append(evaluation.reference)
    rows = [("", *(each.name for each in models))] if len(models) > 1 else []
    rows += [
        (label, *(_figure(of(each)) for each in models))
        for label, of in _FIGURES
        if any(of(each) is not None for each in models)
    ]
    rows += list(_accuracy_rows(models))
    console.show_table(f"{evaluation.model.name} on {evaluation.tokens} tokens of text", rows)
    if evaluation.comparison is not None and evaluation.reference is not None:
        console.show_table(
            f"distance from {evaluation.reference.name}", _distance_rows(evaluation.comparison)
        )


def _accuracy_rows(models: list[ModelFigures]) -> Iterator[tuple[str, ...]]:
    for mode in models[0].task_accuracy:
        found = [model.task_accuracy.get(mode) for model in models]
        cells = ["" if each is None else f"{100 * each.accuracy:.1f} %" for each in found]
        yield (f"right answers, {mode}", *cells)
        speeds = [None if each is None else each.tokens_per_preview for each in found]
        if any(speed is not None for speed in speeds):
            yield (f"tokens per preview, {mode}", *map(_figure, speeds))


def _distance_rows(comparison: Comparison) -> list[tuple[str, str]]:
    rows = [("KL in nats, causal rows", _small(comparison.kl_causal))]
    if comparison.kl_masked_mean is not None:
        rows.append(("KL in nats, masked rows", _small(comparison.kl_masked_mean)))
    rows += [
        (f"  at mask ratio {ratio}", _small(kl))
        for ratio, kl in comparison.kl_masked.items()
        if kl is not None
    ]
    rows.append(("same likeliest token", f"{100 * comparison.top1_agreement:.2f} %"))
    if comparison.accepted_flip_rate is not None:
        flips = f"{100 * comparison.accepted_flip_rate:.2f} % of {comparison.accepted_rows}"
        rows.append(("flips among accepted rows", flips))
    return rows


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _small(value: float) -> str:
    return f"{value:.5f}"
