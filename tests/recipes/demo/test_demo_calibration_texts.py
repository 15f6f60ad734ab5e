"""The bundled texts of the demo tasks are what the recipe writes, from both sides of the split."""

from itertools import islice
from types import ModuleType

import pytest

from clover_local.demo.tasks.example import Example, is_held_out, may_train
from clover_local.demo.tasks.stream import FAMILIES
from clover_local.quant.documents import parse_documents


@pytest.mark.parametrize("held_out", [True, False], ids=["held_out", "calibration"])
def test_bundled_file_is_what_the_recipe_writes(
    held_out: bool, demo_calibration_texts: ModuleType
) -> None:
    recipe = demo_calibration_texts
    seed = recipe.HELD_OUT_SEED if held_out else recipe.CALIBRATION_SEED
    size = recipe.HELD_OUT_BYTES if held_out else recipe.CALIBRATION_BYTES
    path = recipe.FOLDER / "held_out" / recipe.NAME if held_out else recipe.FOLDER / recipe.NAME
    text = recipe.documents(seed, held_out=held_out, size=size)
    assert path.read_text(encoding="utf-8") == text
    assert size <= len(text.encode()) < size + 2000


def test_no_question_of_one_file_is_a_question_of_the_other(
    demo_calibration_texts: ModuleType,
) -> None:
    def some(seed: int, *, held_out: bool) -> list[Example]:
        drawn = demo_calibration_texts.conversations(seed, held_out=held_out)
        return list(islice(drawn, 110))

    training = some(demo_calibration_texts.CALIBRATION_SEED, held_out=False)
    held_out = some(demo_calibration_texts.HELD_OUT_SEED, held_out=True)
    assert all(map(may_train, training))
    assert all(is_held_out(example.key) for example in held_out)
    assert {example.family for example in held_out} == set(FAMILIES)


def test_document_reads_back_as_the_conversation(demo_calibration_texts: ModuleType) -> None:
    drawn = demo_calibration_texts.conversations(3, held_out=False)
    examples = list(islice(drawn, 44))
    for number, example in enumerate(examples):
        text = demo_calibration_texts.document(example, f"number {number}")
        (document,) = parse_documents(text.encode(), source="text", kind="demo")
        assert document.title == f"number {number}"
        assert list(document.messages[:-1]) == list(example.messages)
        answer = str(document.messages[-1]["content"])
        assert answer.endswith(example.answer)
        assert answer.startswith("<think>\n") == example.think
        assert list(document.tools) == list(example.tools)
