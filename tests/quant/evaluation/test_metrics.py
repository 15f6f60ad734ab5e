"""Metrics against their formulas, row by row."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from clover_local.config import ModelConfig
from clover_local.errors import CloverError
from clover_local.model.clover import Head
from clover_local.quant.evaluation import metrics
from clover_local.quant.evaluation.metrics import (
    Divergence,
    Opinions,
    accepted_flips,
    diverge,
    log_probabilities,
    opinions,
    perplexity,
    tokens_per_preview,
)


def some_head(config: ModelConfig, seed: int) -> Head:
    generator = torch.Generator().manual_seed(seed)
    shapes = {
        "norm.weight": (config.hidden_size,),
        "lm_head.weight": (config.vocab_size, config.hidden_size),
    }
    weights = {
        name: torch.randn(shape, generator=generator) * 0.3 for name, shape in shapes.items()
    }
    return Head(config, weights.__getitem__)


def opinions_of(token: list[int], confidence: list[float]) -> Opinions:
    return Opinions(
        torch.tensor(token),
        torch.tensor(confidence, dtype=torch.float64),
        torch.ones(len(token), dtype=torch.float64),
    )


@pytest.fixture
def states(odd_config: ModelConfig) -> Tensor:
    return torch.randn(7, odd_config.hidden_size, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("mask", [0, 50, 96])
def test_mask_has_probability_zero_and_the_others_sum_to_one(
    mask: int, odd_config: ModelConfig, states: Tensor
) -> None:
    head = some_head(odd_config, 1)
    p = log_probabilities(head, states, mask_token_id=mask).exp()
    logits = head(states).double()
    kept = [token for token in range(odd_config.vocab_size) if token != mask]
    assert torch.equal(p[:, mask], torch.zeros(7, dtype=torch.float64))
    torch.testing.assert_close(p[:, kept], logits[:, kept].softmax(-1))


@pytest.mark.parametrize("rows_per_chunk", [1, 3, 100])
def test_kl_is_the_sum_over_tokens_whatever_the_chunks(
    rows_per_chunk: int,
    odd_config: ModelConfig,
    states: Tensor,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(metrics, "CHUNK_BYTES", rows_per_chunk * 4 * odd_config.vocab_size)
    model, reference = some_head(odd_config, 1), some_head(odd_config, 2)
    targets = torch.arange(7)
    found = diverge(
        model,
        states,
        reference_head=reference,
        reference_states=states + 0.1,
        targets=targets,
        mask_token_id=96,
    )
    q = model(states).double()[:, :96].softmax(-1)
    p = reference(states + 0.1).double()[:, :96].softmax(-1)
    for row in range(7):
        kl = sum(float(p[row, v]) * math.log(float(p[row, v] / q[row, v])) for v in range(96))
        assert float(found.kl[row]) == pytest.approx(kl, rel=1e-5)  # float32 logits
    assert torch.equal(found.model.token, q.argmax(-1))
    assert torch.equal(found.reference.token, p.argmax(-1))
    torch.testing.assert_close(found.model.confidence, q.amax(-1), rtol=1e-5, atol=0)
    torch.testing.assert_close(
        found.reference.surprise, -p[range(7), targets].log(), rtol=1e-5, atol=0
    )
    alone = opinions(model, states, targets=targets, mask_token_id=96)
    assert torch.equal(alone.token, found.model.token)
    torch.testing.assert_close(alone.surprise, found.model.surprise, rtol=1e-5, atol=0)


def test_model_against_itself_is_exactly_the_same(odd_config: ModelConfig, states: Tensor) -> None:
    head = some_head(odd_config, 1)
    found = diverge(
        head,
        states,
        reference_head=head,
        reference_states=states,
        targets=torch.zeros(7, dtype=torch.long),
        mask_token_id=96,
    )
    assert torch.equal(found.kl, torch.zeros(7, dtype=torch.float64))
    assert bool(found.agrees.all())


def test_token_that_the_reference_excludes_adds_nothing(odd_config: ModelConfig) -> None:
    model, reference = some_head(odd_config, 1), some_head(odd_config, 2)
    states = 1e4 * torch.eye(odd_config.hidden_size)[:3]
    reference.norm = reference.norm * 1e5  # logits of thousands: all but one token underflow
    found = diverge(
        model,
        states,
        reference_head=reference,
        reference_states=states,
        targets=torch.zeros(3, dtype=torch.long),
        mask_token_id=96,
    )
    assert bool(found.kl.isfinite().all())
    assert bool((found.kl > 0).all())


def test_logits_that_are_no_numbers_are_refused(odd_config: ModelConfig, states: Tensor) -> None:
    head = some_head(odd_config, 1)
    states[4, 0] = math.nan
    with pytest.raises(CloverError, match="no numbers"):
        log_probabilities(head, states, mask_token_id=96)


def test_no_rows_give_empty_opinions(odd_config: ModelConfig) -> None:
    none = torch.empty(0, odd_config.hidden_size)
    found = opinions(
        some_head(odd_config, 1), none, targets=torch.empty(0).long(), mask_token_id=96
    )
    assert (len(found.token), len(found.confidence), len(found.surprise)) == (0, 0, 0)


def test_perplexity_is_the_exponential_of_the_mean_surprise() -> None:
    said = replace(opinions_of([1, 2], [0.5, 0.5]), surprise=torch.tensor([1.0, 3.0]).double())
    assert perplexity(said) == pytest.approx(math.exp(2))


def test_flips_count_only_rows_that_the_reference_accepts() -> None:
    reference = opinions_of([1, 2, 3, 4], [0.96, 0.95, 0.99, 0.2])
    model = opinions_of([1, 9, 9, 9], [0.1, 0.99, 0.1, 0.99])
    divergence = Divergence(torch.zeros(4), model, reference)
    assert accepted_flips(divergence, threshold=0.95) == (1, 2)


def test_tokens_per_preview_counts_at_least_one_a_block() -> None:
    confidence = torch.tensor([0.96, 0.97, 0.5, 0.1, 0.2, 0.99], dtype=torch.float64)
    blocks = torch.tensor([0, 0, 0, 2, 2, 5])
    assert tokens_per_preview(confidence, blocks, threshold=0.95) == pytest.approx((2 + 1 + 1) / 3)
    assert tokens_per_preview(confidence[:0], blocks[:0], threshold=0.95) is None
