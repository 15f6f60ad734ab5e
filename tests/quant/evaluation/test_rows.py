"""Which rows are compared, and that streaming a checkpoint gives the model's own hidden states."""

from collections.abc import Callable

import pytest
import torch

from clover_local.cache import SequenceState
from clover_local.config import ModelConfig
from clover_local.errors import CloverError
from clover_local.model.clover import Clover
from clover_local.quant.calibration import CalibrationSequence, PreviewBlock, make_sequences
from clover_local.quant.documents import Document
from clover_local.quant.evaluation import rows as module
from clover_local.quant.evaluation.rows import EvaluationRows, rows_of, states_of
from clover_local.session import OpenModel

EmptyState = Callable[[ModelConfig], SequenceState]
M = 510  # MASK of the golden model


@pytest.fixture
def rows(golden: OpenModel, documents: tuple[Document, ...]) -> EvaluationRows:
    sequences = make_sequences(
        documents, tokenizer=golden.tokenizer, config=golden.config, tokens=1000, seed=0
    )
    return rows_of(sequences)


def test_causal_rows_have_a_next_token_and_masked_rows_hold_text() -> None:
    blocks = (
        PreviewBlock(2, (7, M, M), (1, 2), text_rows=3, ratio=0.6),
        PreviewBlock(4, (M, 6, M), (0, 2), text_rows=2, ratio=0.5),
    )
    first = CalibrationSequence((5, 6, 7, 8, 9, 6), blocks)
    second = CalibrationSequence((1, 2), ())
    rows = rows_of([first, second])
    assert rows.count == 6 + 3 + 3 + 2
    assert rows.causal.tolist() == [0, 1, 2, 3, 4, 12]
    assert rows.next_tokens.tolist() == [6, 7, 8, 9, 6, 2]
    assert rows.masked.tolist() == [7, 8, 9]
    assert rows.hidden_tokens.tolist() == [8, 9, 9]
    assert rows.ratios.tolist() == [0.6, 0.6, 0.5]
    assert rows.blocks.tolist() == [0, 0, 1]
    assert set(rows.lens.tolist()) == {0, 1, 2, 3, 4, 7, 8, 9, 12}


def test_text_without_a_next_token_is_refused() -> None:
    with pytest.raises(CloverError, match="no row to evaluate"):
        rows_of([CalibrationSequence((5,), ())])


def test_streamed_logits_are_those_of_the_loaded_model(
    golden: OpenModel, golden_model: Clover, rows: EvaluationRows, empty_state: EmptyState
) -> None:
    states = states_of(golden, rows)
    causal, masked = [], []
    for sequence in rows.sequences:
        state = empty_state(golden.config)
        for block in sequence.previews:
            golden_model.commit(sequence.tokens[state.length : block.start], state, logits="none")
            logits = golden_model.preview(block.tokens, state).logits
            masked.append(logits[[row for row in block.masked if row < block.text_rows]])
        state.reset()
        causal.append(golden_model.commit(sequence.tokens, state, logits="all").logits[:-1])
    torch.testing.assert_close(states.head(states.causal), torch.cat(causal), rtol=0, atol=2e-5)
    torch.testing.assert_close(states.head(states.masked), torch.cat(masked), rtol=0, atol=2e-5)
    place = int((rows.causal == rows.lens[0]).nonzero())
    assert torch.equal(states.lens[-1, 0], states.causal[place])


def test_experts_are_counted_over_all_rows(golden: OpenModel, rows: EvaluationRows) -> None:
    seen = []
    states = states_of(golden, rows, on_layer=lambda: seen.append(1))
    config = golden.config
    assert len(seen) == len(states.tokens_per_expert) == config.num_hidden_layers
    for counts in states.tokens_per_expert:
        assert len(counts) == config.num_experts
        most = rows.count * config.num_experts_per_tok
        assert most / 2 < sum(counts) <= most  # a coreset may leave a row fewer


def test_large_states_go_through_a_file_without_a_change(
    golden: OpenModel, rows: EvaluationRows, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_memory = states_of(golden, rows)
    monkeypatch.setattr(module, "IN_MEMORY_BYTES", 1000)
    on_disk = states_of(golden, rows)
    assert torch.equal(on_disk.causal, in_memory.causal)
    assert torch.equal(on_disk.masked, in_memory.masked)
    assert torch.equal(on_disk.lens, in_memory.lens)
