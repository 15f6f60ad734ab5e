"""The quality of the demo model's quantized forms, as a Markdown table.

    python recipes/evaluate_quantization.py [--work FOLDER] [--questions 100] [--tokens 20000]

Each form is made by `clover_local.quant.pipeline` from the same calibration text and compared with
the source on held-out text and held-out questions. What is in the work folder already is not made
again. The demo's experts have 64 inputs at their down projection, so that groups of 128 do not
divide: 64 and 32 are compared. NF4 is a baseline that the runtime has no kernels for: its weights
are stored in the source's dtype after rounding, so that its size here is not NF4's.
"""

import argparse
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from clover_local.errors import CloverError
from clover_local.quant.documents import held_out_documents
from clover_local.quant.evaluation.evaluate import evaluate
from clover_local.quant.evaluation.result import Evaluation
from clover_local.quant.evaluation.tasks import TaskAccuracy, task_accuracy
from clover_local.quant.pipeline.run import quantize
from clover_local.quant.pipeline.source import PlainSource, open_source
from clover_local.quant.profiles import Choices, resolve
from clover_local.session import OpenModel, open_model

COLUMNS = (
    "form",
    "MB",
    "bits a weight",
    "KL causal",
    "KL masked",
    "same top 1",
    "flips",
    "tokens a preview",
    "right, ar",
    "right, denoise",
)


@dataclass(frozen=True)
class Form:
    """One way to quantize."""

    name: str
    choices: Choices


FORMS = (
    Form("INT4 g64 GPTQ, trunk INT8", Choices(group_size=64)),
    Form("INT4 g64 rounding, trunk INT8", Choices(group_size=64, method="rtn")),
    Form("INT4 g64 GPTQ, trunk BF16", Choices(group_size=64, trunk_bits=16)),
    Form("INT4 g64 rounding, trunk BF16", Choices(group_size=64, method="rtn", trunk_bits=16)),
    Form("INT4 g32 GPTQ, trunk INT8", Choices(group_size=32)),
    Form("INT4 g32 rounding, trunk INT8", Choices(group_size=32, method="rtn")),
    Form("profile quality", Choices(profile="quality")),
    Form("NF4, trunk BF16", Choices(method="nf4", trunk_bits=16)),
)


def make(form: Form, source: PlainSource, work: Path) -> OpenModel:
    """The quantized model, from the work folder if it is there."""
    choices = replace(form.choices, evaluation_tokens=0)
    recipe, _ = resolve(choices, source.config, device="cpu")
    folder = work / form.name.lower().replace(", ", "-").replace(" ", "-")
    return open_model(str(quantize(source, folder, recipe=recipe).folder))


def row(name: str, found: Evaluation, accuracy: dict[str, TaskAccuracy]) -> str:
    """One line of the table."""
    model, far = found.model, found.comparison
    cells = [name, f"{model.bytes / 1e6:.2f}", f"{model.bits_per_weight:.2f}"]
    if far is None:
        cells += [""] * 4
    else:
        cells += [f"{far.kl_causal:.5f}", _number(far.kl_masked_mean, 5)]
        cells += [_percent(far.top1_agreement), _percent(far.accepted_flip_rate)]
    cells += [_number(model.tokens_per_preview, 2)]
    cells += [f"{100 * accuracy[mode].accuracy:.1f} %" for mode in ("ar", "denoise")]
    return line(cells)


def line(cells: list[str]) -> str:
    """Cells as Markdown."""
    return f"| {' | '.join(cells)} |"


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.2f} %"


@contextmanager
def work_folder(given: Path | None) -> Iterator[Path]:
    """The folder for the quantized models; a temporary one where none is given."""
    if given is not None:
        given.mkdir(parents=True, exist_ok=True)
        yield given
        return
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, help="keep the quantized models in this folder")
    parser.add_argument("--questions", type=int, default=100, help="held-out questions a family")
    parser.add_argument("--tokens", type=int, default=20_000, help="of held-out text")
    arguments = parser.parse_args()
    demo, source = open_model("demo"), open_source("demo")
    if not isinstance(source, PlainSource):
        raise SystemExit("the demo model is quantized already")
    documents = held_out_documents(demo.tokenizer)
    print(line(list(COLUMNS)))
    print(line(["---", *["---:"] * (len(COLUMNS) - 1)]))
    alone = evaluate(demo, documents=documents, tokens=arguments.tokens)
    print(row("BF16", alone, task_accuracy(demo, questions=arguments.questions)), flush=True)
    with work_folder(arguments.work) as work:
        for form in FORMS:
            try:
                model = make(form, source, work)
            except CloverError as error:
                if form.choices.method != "nf4":
                    raise
                print(f"{form.name}: {error}", file=sys.stderr)  # needs bitsandbytes
                continue
            found = evaluate(model, against=demo, documents=documents, tokens=arguments.tokens)
            accuracy = task_accuracy(model, questions=arguments.questions)
            print(row(form.name, found, accuracy), flush=True)


if __name__ == "__main__":
    main()
