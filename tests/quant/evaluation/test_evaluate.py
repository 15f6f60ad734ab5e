"""The whole evaluation: against itself, against a worse model, refusals, task accuracy."""

import json
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from clover_local.config import ModelConfig
from clover_local.errors import CloverError
from clover_local.hub import locate
from clover_local.quant.calibration import RATIOS
from clover_local.quant.documents import Document, held_out_documents
from clover_local.quant.evaluation.evaluate import evaluate
from clover_local.session import OpenModel, open_model
from clover_local.tokenizer import Tokenizer

Documents = tuple[Document, ...]
Altered = Callable[..., OpenModel]
Noisy = Callable[[float], OpenModel]


def test_model_against_itself_has_no_distance(golden: OpenModel, documents: Documents) -> None:
    found = evaluate(golden, against=golden, documents=documents)
    comparison = found.comparison
    assert comparison is not None
    assert comparison.kl_causal == 0
    assert comparison.kl_masked_mean == 0
    assert {kl for kl in comparison.kl_masked.values() if kl is not None} == {0}
    assert comparison.top1_agreement == 1
    assert comparison.top1_agreement_masked == 1
    assert comparison.kl_by_layer == (0,) * golden.config.num_hidden_layers
    assert found.reference == found.model


def test_more_noise_is_farther_in_every_figure(
    golden: OpenModel, noisy: Noisy, documents: Documents
) -> None:
    low = replace(golden, config=replace(golden.config, threshold=0.001))
    little = evaluate(noisy(0.005), against=low, documents=documents).comparison
    much = evaluate(noisy(0.02), against=low, documents=documents).comparison
    assert little is not None
    assert much is not None
    assert 0 < little.kl_causal < much.kl_causal / 2
    assert little.kl_masked_mean is not None
    assert much.kl_masked_mean is not None
    assert 0 < little.kl_masked_mean < much.kl_masked_mean / 2
    assert much.top1_agreement < little.top1_agreement < 1
    assert much.accepted_rows == little.accepted_rows > 50
    assert (much.accepted_flip_rate or 0) > (little.accepted_flip_rate or 0)
    assert much.kl_by_layer[0] < much.kl_by_layer[-1]


def test_alone_a_model_has_its_own_figures_only(golden: OpenModel, documents: Documents) -> None:
    found = evaluate(golden, documents=documents)
    assert found.reference is None
    assert found.comparison is None
    both = evaluate(golden, against=golden, documents=documents)
    assert found.model.perplexity == pytest.approx(both.model.perplexity, rel=1e-12)
    assert found.model.tokens_per_preview == both.model.tokens_per_preview
    assert found.model.perplexity > 511  # random weights: worse than equal choices
    assert found.model.bits_per_weight == 16
    assert found.tokens > 50


def test_json_has_every_stable_key(golden: OpenModel, documents: Documents) -> None:
    found = json.loads(json.dumps(evaluate(golden, against=golden, documents=documents).to_json()))
    stable = (
        "model against bytes bits_per_weight kl_causal kl_masked top1_agreement "
        "accepted_flip_rate perplexity tokens_per_preview task_accuracy"
    )
    assert set(stable.split()) <= set(found)
    assert list(found["kl_masked"]) == [f"{ratio:.1f}" for ratio in RATIOS]
    assert (found["model"], found["against"]) == ("golden", "golden")
    assert found["reference"]["perplexity"] == found["perplexity"]


def test_causal_model_is_compared_on_causal_rows_only(
    golden: OpenModel, altered: Altered, documents: Documents
) -> None:
    def drop(name: str, tensor: Tensor) -> Tensor | None:
        return None if "conv_right" in name or "bd_softmax" in name else tensor

    causal = altered(drop)
    comparison = evaluate(causal, against=golden, documents=documents).comparison
    assert comparison is not None
    assert comparison.kl_causal == 0
    assert comparison.kl_masked == {}
    assert comparison.kl_masked_mean is None
    assert comparison.accepted_flip_rate is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda config: replace(config, vocab_size=513), "vocab_size 512, other 513"),
        (lambda config: replace(config, mask_token_id=3), "mask_token_id 510, other 3"),
        (lambda config: replace(config, block_size=16), "block_size 32, other 16"),
    ],
    ids=["vocab_size", "mask_token_id", "block_size"],
)
def test_models_that_read_text_differently_are_refused(
    change: Callable[[ModelConfig], ModelConfig],
    message: str,
    golden: OpenModel,
    documents: Documents,
) -> None:
    other = replace(golden, name="other", config=change(golden.config))
    with pytest.raises(CloverError, match=f"golden has {message}"):
        evaluate(golden, against=other, documents=documents)


def test_another_vocabulary_is_refused(golden: OpenModel, documents: Documents) -> None:
    other = replace(golden, name="other", tokenizer=Tokenizer.load(locate("demo")))
    with pytest.raises(CloverError, match="golden and other have different vocabularies"):
        evaluate(golden, against=other, documents=documents)


def test_text_without_an_answer_is_refused(golden: OpenModel) -> None:
    question = Document("q", "q", ({"role": "user", "content": "Hello?"},))
    with pytest.raises(CloverError, match="no block to preview"):
        evaluate(golden, documents=[question])


def test_weights_that_are_no_numbers_are_refused(altered: Altered, documents: Documents) -> None:
    def poison(name: str, tensor: Tensor) -> Tensor:
        return torch.full_like(tensor, torch.nan) if "layers.2.mlp.gate" in name else tensor

    with pytest.raises(CloverError, match="no numbers"):
        evaluate(altered(poison), documents=documents)


def test_demo_model_answers_questions_in_both_modes() -> None:
    demo = open_model("demo")
    steps: list[tuple[int, int]] = []
    found = evaluate(
        demo,
        documents=held_out_documents(demo.tokenizer),
        tokens=300,
        questions=1,
        on_progress=lambda done, total: steps.append((done, total)),
    )
    accuracy = found.model.task_accuracy
    assert accuracy["ar"].accuracy > 0.8
    assert accuracy["denoise"].accuracy > 0.8
    assert accuracy["ar"].tokens_per_preview is None
    assert (accuracy["denoise"].tokens_per_preview or 0) > 3
    assert found.model.perplexity < 3
    assert (found.model.tokens_per_preview or 0) > 3
    assert steps == [(done, len(steps)) for done in range(1, len(steps) + 1)]


def test_other_models_are_asked_nothing(golden: OpenModel, documents: Documents) -> None:
    assert evaluate(golden, documents=documents, questions=5).model.task_accuracy == {}
