"""Evaluates a checkpoint on text, alone or against another one.

Teacher-forced: both models read the same text and the same masked blocks, so that each row can be
compared. The models are streamed one after the other; neither has to fit in memory.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from clover_local.checkpoint.parameters import count_parameters
from clover_local.demo.tasks.stream import FAMILIES
from clover_local.errors import CloverError
from clover_local.quant.calibration import RATIOS, CalibrationSequence, make_sequences
from clover_local.quant.documents import Document, knows_demo_tasks
from clover_local.quant.evaluation.metrics import (
    Divergence,
    Opinions,
    accepted_flips,
    diverge,
    opinions,
    perplexity,
    tokens_per_preview,
)
from clover_local.quant.evaluation.result import Comparison, Evaluation, ModelFigures
from clover_local.quant.evaluation.rows import EvaluationRows, ModelStates, rows_of, states_of
from clover_local.quant.evaluation.tasks import (
    TaskAccuracy,
    modes_of,
    task_accuracy,
)
from clover_local.quant.profiles import Choices
from clover_local.session import OpenModel

MASKINGS = 4
"""Previews of each block: few masked rows with a large divergence make most of its mean."""


def evaluate(
    model: OpenModel,
    *,
    against: OpenModel | None = None,
    documents: Sequence[Document],
    tokens: int = Choices.evaluation_tokens,
    seed: int = Choices.seed,
    questions: int = 0,
    device: str = "cpu",
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Evaluation:
    """The quality of `model`, and its distance from `against`.

    Args:
        documents: the text; the same documents, budget and seed give the same rows.
        tokens: of text, as far as there is so much.
        questions: of each family of the demo's tasks, for a model that has the demo's vocabulary.
        on_progress: called with steps done and steps in all.

    Raises:
        CloverError: models of different vocabularies, text without a row to evaluate, weights that
            cannot be read or whose logits are no numbers.
    """
    models = [model] if against is None else [model, against]
    for other in models[1:]:
        _require_comparable(model, other)
    sequences = _sequences(models, documents, tokens=tokens, seed=seed)
    rows = rows_of(sequences)
    asked = [each for each in models if questions and knows_demo_tasks(each.tokenizer)]
    answers = sum(len(modes_of(each)) for each in asked) * questions * len(FAMILIES)
    layers = sum(each.config.num_hidden_layers for each in models)
    steps = _Steps(layers + len(models) + answers, on_progress)
    states = [states_of(each, rows, device=device, on_layer=steps.next) for each in models]
    if against is None:
        said, comparison = [_said(model, states[0], rows)], None
    else:
        said, comparison = _compare(model, against, states, rows)
    for _ in models:
        steps.next()
    figures = [
        _figures(
            each,
            rows,
            own,
            tokens_per_expert=state.tokens_per_expert,
            accuracy=task_accuracy(each, questions=questions, device=device, on_answer=steps.next)
            if each in asked
            else {},
        )
        for each, own, state in zip(models, said, states, strict=True)
    ]
    return Evaluation(
        figures[0],
        figures[1] if against else None,
        comparison,
        sequences=len(sequences),
        tokens=sum(len(sequence.tokens) for sequence in sequences),
        masked_rows=len(rows.masked),
    )


def _sequences(
    models: Sequence[OpenModel], documents: Sequence[Document], *, tokens: int, seed: int
) -> tuple[CalibrationSequence, ...]:
    """What all the models read: previews only where each can preview."""
    first = models[0]
    sequences = make_sequences(
        documents,
        tokenizer=first.tokenizer,
        config=first.config,
        tokens=tokens,
        seed=seed,
        maskings=MASKINGS,
    )
    if not all(each.checkpoint.has_diffusion for each in models):
        return tuple(sequence.without_previews() for sequence in sequences)
    if not any(sequence.previews for sequence in sequences):
        raise CloverError("the text gives no block to preview: pass a longer one")
    return sequences


class _Steps:
    """Counts steps for the caller."""

    def __init__(self, total: int, on_progress: Callable[[int, int], None]) -> None:
        self.done, self.total, self.on_progress = 0, total, on_progress

    def next(self) -> None:
        """Tells that one more is done."""
        self.done += 1
        self.on_progress(self.done, self.total)


@dataclass(frozen=True, eq=False)
class _Said:
    """What one model says about the text."""

    causal: Opinions
    masked: Opinions


def _require_comparable(model: OpenModel, reference: OpenModel) -> None:
    """Raises CloverError when the two do not read a text as the same rows."""
    for name in ("vocab_size", "mask_token_id", "block_size"):
        own, other = getattr(model.config, name), getattr(reference.config, name)
        if own != other:
            raise CloverError(
                f"{model.name} has {name} {own}, {reference.name} {other}: compare checkpoints of "
                "the same model"
            )
    if model.tokenizer.vocabulary != reference.tokenizer.vocabulary:
        raise CloverError(
            f"{model.name} and {reference.name} have different vocabularies: compare checkpoints "
            "of the same model"
        )


def _said(model: OpenModel, states: ModelStates, rows: EvaluationRows) -> _Said:
    mask = model.config.mask_token_id
    return _Said(
        opinions(states.head, states.causal, targets=rows.next_tokens, mask_token_id=mask),
        opinions(states.head, states.masked, targets=rows.hidden_tokens, mask_token_id=mask),
    )


def _compare(
    model: OpenModel, reference: OpenModel, states: Sequence[ModelStates], rows: EvaluationRows
) -> tuple[list[_Said], Comparison]:
    """What both models say, and how they differ."""
    own, other = states

    def differ(a: Tensor, b: Tensor, targets: Tensor) -> Divergence:
        return diverge(
            own.head,
            a,
            reference_head=other.head,
            reference_states=b,
            targets=targets,
            mask_token_id=model.config.mask_token_id,
        )

    causal = differ(own.causal, other.causal, rows.next_tokens)
    masked = differ(own.masked, other.masked, rows.hidden_tokens)
    flips, accepted = accepted_flips(masked, threshold=reference.config.threshold)
    none = torch.zeros(len(rows.lens), dtype=torch.long)  # the lens reads KL alone
    same_depth = len(own.lens) == len(other.lens)
    comparison = Comparison(
        kl_causal=float(causal.kl.mean()),
        kl_masked={f"{ratio:.1f}": _mean(masked.kl[rows.ratios == ratio]) for ratio in RATIOS}
        if len(rows.masked)
        else {},
        kl_masked_mean=_mean(masked.kl),
        top1_agreement=float(torch.cat([causal.agrees, masked.agrees]).double().mean()),
        top1_agreement_causal=float(causal.agrees.double().mean()),
        top1_agreement_masked=_mean(masked.agrees),
        accepted_flip_rate=flips / accepted if accepted else None,
        accepted_rows=accepted,
        kl_by_layer=tuple(
            float(differ(a, b, none).kl.mean()) for a, b in zip(own.lens, other.lens, strict=True)
        )
        if same_depth
        else (),
    )
    said = [_Said(causal.model, masked.model), _Said(causal.reference, masked.reference)]
    return said, comparison


def _figures(
    model: OpenModel,
    rows: EvaluationRows,
    said: _Said,
    *,
    tokens_per_expert: tuple[tuple[int, ...], ...],
    accuracy: dict[str, TaskAccuracy],
) -> ModelFigures:
    checkpoint = model.checkpoint
    parameters = count_parameters(model.config, diffusion=checkpoint.has_diffusion).total
    return ModelFigures(
        name=model.name,
        bytes=checkpoint.nbytes,
        bits_per_weight=8 * checkpoint.nbytes / parameters,
        perplexity=perplexity(said.causal),
        perplexity_masked=perplexity(said.masked) if len(rows.masked) else None,
        tokens_per_preview=tokens_per_preview(
            said.masked.confidence, rows.blocks, threshold=model.config.threshold
        ),
        tokens_per_expert=tokens_per_expert,
        task_accuracy=accuracy,
    )


def _mean(values: Tensor) -> float | None:
    """The mean of as many rows as there are; None of none."""
    return float(values.double().mean()) if len(values) else None
