"""How many held-out questions a model of the demo's kind answers exactly."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from clover_local.decoding.settings import resolve
from clover_local.demo.score import held_out, score
from clover_local.session import OpenModel, load

SEED = 7  # of the questions: always the same ones, whatever the seed of the texts
MAX_NEW_TOKENS = 256


@dataclass(frozen=True)
class TaskAccuracy:
    """The answers in one mode."""

    accuracy: float  # share of exactly right answers
    tokens_per_preview: float | None  # None in a mode without previews
    tokens_per_forward: float


def task_accuracy(
    model: OpenModel,
    *,
    questions: int,
    device: str = "cpu",
    on_answer: Callable[[], None] = lambda: None,
) -> dict[str, TaskAccuracy]:
    """By mode, `questions` of each family of tasks; `denoise` only where the model can preview."""
    settings = resolve(model.config, model.generation, {}).settings
    settings = replace(settings, max_new_tokens=MAX_NEW_TOKENS)
    session = load(model, settings, device=device, dtype="float32")
    examples = held_out(SEED, per_family=questions)
    found = {}
    for mode in modes_of(model):
        session.generator.settings = replace(settings, mode=mode)
        answers = score(
            session.generator, model.tokenizer, examples, on_answer=lambda done: on_answer()
        )
        found[mode] = TaskAccuracy(
            answers.accuracy(), answers.tokens_per_preview, answers.tokens_per_forward
        )
    return found


def modes_of(model: OpenModel) -> tuple[str, ...]:
    """The modes whose accuracy is measured."""
    return ("ar", "denoise") if model.checkpoint.has_diffusion else ("ar",)
