"""Verify and accept: rows that count only as far as they are accepted."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from clover_local.cache import SequenceState
from clover_local.config import ModelConfig
from clover_local.model.clover import Clover
from clover_local.model.graphs import GraphedClover

EmptyState = Callable[[ModelConfig], SequenceState]
RandomModel = Callable[[ModelConfig], Clover]
Cases = Mapping[str, Any]

PROMPT = [(7 * i + 3) % 90 for i in range(19)]
ROWS = [(11 * i + 5) % 90 for i in range(16)]


def snapshot(state: SequenceState) -> list[Tensor]:
    """Copies of everything a state holds."""
    tensors = [*state.committed.recurrent, *state.committed.conv]
    for layer in state.attention_layers:
        tensors += state.keys_values(layer)
    return [torch.tensor(state.committed.tokens), *(x.clone() for x in tensors)]


@pytest.fixture(scope="module", params=["golden", "odd"])
def model(
    request: pytest.FixtureRequest,
    golden_model: Clover,
    odd_config: ModelConfig,
    random_model: RandomModel,
) -> Clover:
    return golden_model if request.param == "golden" else random_model(odd_config)


def prepared(model: Clover, empty_state: EmptyState) -> SequenceState:
    state = empty_state(model.config)
    model.commit(PROMPT, state, logits="none")
    return state


def test_verify_gives_the_logits_of_a_commit_and_leaves_every_bit_of_the_state(
    model: Clover, empty_state: EmptyState
) -> None:
    state = prepared(model, empty_state)
    before = snapshot(state)
    logits = model.verify(ROWS, state).logits
    assert all(torch.equal(a, b) for a, b in zip(snapshot(state), before, strict=True))
    assert torch.equal(logits, model.commit(ROWS, state, logits="all").logits)


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 11, 16])
def test_accepted_rows_leave_the_state_of_their_commit(
    rows: int, model: Clover, empty_state: EmptyState
) -> None:
    """And whatever runs next sees nothing of the rows that were refused."""
    ours, theirs = prepared(model, empty_state), prepared(model, empty_state)
    model.accept(model.verify(ROWS, ours).record, rows, ours)
    model.commit(ROWS[:rows], theirs)
    for a, b in zip(snapshot(ours), snapshot(theirs), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=2e-5)
    block = [model.config.mask_token_id] * 8
    torch.testing.assert_close(
        model.preview(block, ours).logits, model.preview(block, theirs).logits, rtol=0, atol=2e-5
    )
    torch.testing.assert_close(
        model.commit([1, 2], ours).logits, model.commit([1, 2], theirs).logits, rtol=0, atol=2e-5
    )


def test_many_rounds_do_not_drift(model: Clover, empty_state: EmptyState) -> None:
    ours, theirs = prepared(model, empty_state), prepared(model, empty_state)
    for number in range(20):
        rows = 1 + 5 * number % 16
        model.accept(model.verify(ROWS, ours).record, rows, ours)
        model.commit(ROWS[:rows], theirs)
    for a, b in zip(snapshot(ours), snapshot(theirs), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-4)


def test_fixed_buffers_accept_the_same_rows(model: Clover, empty_state: EmptyState) -> None:
    graphed = GraphedClover(model, on_fallback=lambda line: None)
    ours, theirs = prepared(model, empty_state), prepared(model, empty_state)
    for rows in (3, 1, 16):
        block = [model.config.mask_token_id] * 16
        got, expected = graphed.preview(block, ours).logits, model.preview(block, theirs).logits
        assert torch.equal(got, expected)
        graphed.accept(graphed.verify(ROWS, ours).record, rows, ours)
        model.accept(model.verify(ROWS, theirs).record, rows, theirs)
        assert all(map(torch.equal, snapshot(ours), snapshot(theirs)))
        got, expected = graphed.commit([4], ours).logits, model.commit([4], theirs).logits
        assert torch.equal(got, expected)


def test_golden_block_verified_and_accepted_whole(
    golden_model: Clover,
    golden_cases: Cases,
    golden_expected: Mapping[str, Tensor],
    empty_state: EmptyState,
) -> None:
    state = empty_state(golden_model.config)
    output = golden_model.verify(golden_cases["prompt"], state)
    golden_model.accept(output.record, len(golden_cases["prompt"]), state)
    for layer in range(3):
        for name in ("recurrent", "conv"):
            got = getattr(state.committed, name)[layer]
            expected = golden_expected[f"state.{layer}.{name}"]
            torch.testing.assert_close(got, expected, rtol=0, atol=2e-5)
    output = golden_model.verify(golden_cases["commit_block"], state)
    torch.testing.assert_close(output.logits, golden_expected["commit_logits"], rtol=0, atol=2e-5)


@pytest.mark.parametrize("rows", [0, 17])
def test_rows_that_were_not_verified_are_refused(
    rows: int, model: Clover, empty_state: EmptyState
) -> None:
    state = prepared(model, empty_state)
    record = model.verify(ROWS, state).record
    with pytest.raises(ValueError, match=f"{rows} rows to accept of 16"):
        model.accept(record, rows, state)


def test_a_state_that_has_gone_on_refuses_an_old_record(
    model: Clover, empty_state: EmptyState
) -> None:
    state = prepared(model, empty_state)
    record = model.verify(ROWS, state).record
    model.commit([1], state)
    with pytest.raises(ValueError, match="verified behind 19 tokens; the state, of 20"):
        model.accept(record, 2, state)
