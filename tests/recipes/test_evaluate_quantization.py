"""The table of the quantized forms: one line a form, as many cells as columns."""

from dataclasses import replace
from types import ModuleType

from clover_local.config import read_model_config
from clover_local.hub import locate
from clover_local.quant.evaluation.result import Comparison, Evaluation, ModelFigures
from clover_local.quant.evaluation.tasks import TaskAccuracy
from clover_local.quant.profiles import resolve

MODEL = ModelFigures("made", 2_890_000, 5.54, 1.42, 2.5, 8.34, ((5, 6),), {})
COMPARISON = Comparison(0.0012, {"0.1": 0.0}, 0.01, 0.977, 0.98, 0.97, 0.002, 620, (0.1,))
EVALUATION = Evaluation(MODEL, MODEL, COMPARISON, sequences=3, tokens=100, masked_rows=20)
ACCURACY = {"ar": TaskAccuracy(0.99, None, 1.0), "denoise": TaskAccuracy(0.964, 9.0, 7.0)}


def test_line_has_a_cell_for_each_column(evaluate_quantization: ModuleType) -> None:
    heading = evaluate_quantization.line(list(evaluate_quantization.COLUMNS))
    line = evaluate_quantization.row("INT4", EVALUATION, ACCURACY)
    assert line == (
        "| INT4 | 2.89 | 5.54 | 0.00120 | 0.01000 | 97.70 % | 0.20 % | 8.34 | 99.0 % | 96.4 % |"
    )
    alone = replace(EVALUATION, reference=None, comparison=None)
    source = evaluate_quantization.row("BF16", alone, ACCURACY)
    assert heading.count("|") == line.count("|") == source.count("|")


def test_every_form_fits_the_demo_model(evaluate_quantization: ModuleType) -> None:
    config = read_model_config(locate("demo"))
    for form in evaluate_quantization.FORMS:
        recipe, notes = resolve(form.choices, config, device="cpu")
        if form.choices.method != "nf4":
            assert notes == [], form.name
            assert recipe.method == form.choices.method
