"""Questions of the demo's tasks: which modes answer, and what is counted."""

from dataclasses import replace

from clover_local.demo.tasks.stream import FAMILIES
from clover_local.quant.evaluation.tasks import modes_of, task_accuracy
from clover_local.session import OpenModel, open_model


def test_model_without_diffusion_tensors_answers_in_ar_only(golden: OpenModel) -> None:
    assert modes_of(golden) == ("ar", "denoise")
    causal = replace(golden, checkpoint=replace(golden.checkpoint, has_diffusion=False))
    assert modes_of(causal) == ("ar",)


def test_every_family_is_asked_in_every_mode() -> None:
    answered: list[None] = []
    found = task_accuracy(open_model("demo"), questions=1, on_answer=lambda: answered.append(None))
    assert set(found) == {"ar", "denoise"}
    assert len(answered) == 2 * len(FAMILIES)
    assert found["ar"].tokens_per_forward > 1
    assert found["denoise"].tokens_per_forward > found["ar"].tokens_per_forward
