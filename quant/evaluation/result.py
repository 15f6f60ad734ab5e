"""The figures of an evaluation, and their form as JSON."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from clover_local.quant.evaluation.tasks import TaskAccuracy


@dataclass(frozen=True)
class ModelFigures:
    """What one model's weights and its own predictions say."""

    name: str
    bytes: int  # of its weights in the files
    bits_per_weight: float  # 8 * bytes / parameters
    perplexity: float  # exp(mean of -ln p(next token)) over the commit rows
    perplexity_masked: float | None  # likewise of the hidden tokens, over the masked rows
    tokens_per_preview: float | None  # teacher-forced, see `metrics.tokens_per_preview`
    tokens_per_expert: tuple[tuple[int, ...], ...]  # per layer and expert: rows that used it
    task_accuracy: Mapping[str, TaskAccuracy]  # by mode; empty for a model of another kind

    def to_json(self) -> dict[str, Any]:
        """The figures by name."""
        figures = asdict(self)
        del figures["name"]
        return figures


@dataclass(frozen=True)
class Comparison:
    """How far a model is from a reference on the same rows; KL as in `metrics.diverge`.

    None where the text has no such row, or one of the models cannot preview.
    """

    kl_causal: float  # mean over commit rows
    kl_masked: Mapping[str, float | None]  # mean over the masked rows of blocks by mask ratio
    kl_masked_mean: float | None  # mean over all masked rows
    top1_agreement: float  # share of rows, commit and masked, with the same likeliest token
    top1_agreement_causal: float
    top1_agreement_masked: float | None
    accepted_flip_rate: float | None  # of the masked rows that the reference's threshold accepts
    accepted_rows: int
    kl_by_layer: tuple[float, ...]  # a sample of rows, read after each layer by the model's head


@dataclass(frozen=True)
class Evaluation:
    """A model, and the model that it was compared with, if any."""

    model: ModelFigures
    reference: ModelFigures | None
    comparison: Comparison | None
    sequences: int
    tokens: int  # of the sequences: commit rows
    masked_rows: int  # masked rows with text, over all previews

    def to_json(self) -> dict[str, Any]:
        """The figures by name; those of the reference alone under `reference`."""
        return {
            "model": self.model.name,
            "against": self.reference.name if self.reference else None,
            **self.model.to_json(),
            **(asdict(self.comparison) if self.comparison else {}),
            "reference": self.reference.to_json() if self.reference else None,
            "sequences": self.sequences,
            "tokens": self.tokens,
            "masked_rows": self.masked_rows,
        }
