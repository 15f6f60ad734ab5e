"""The state of a sequence: appending, publishing, going back."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from clover_local.cache import FIRST_ROWS, Committed, SequenceState
from clover_local.config import ModelConfig
from clover_local.memory.parts import CHECKPOINTS

LAYER = 3  # the golden config's attention layer


@pytest.fixture
def state(golden_config: ModelConfig) -> SequenceState:
    return SequenceState(golden_config, context=600, device="cpu", dtype=torch.float32)


def rows_of(state: SequenceState, tokens: Sequence[int]) -> Tensor:
    """Keys that tell which token made them."""
    heads, size = state.keys_values(LAYER)[0].shape[1:]
    return torch.tensor(tokens, dtype=torch.float32)[:, None, None].expand(-1, heads, size)


def write(state: SequenceState, tokens: Sequence[int]) -> None:
    """What an attention layer's commit does."""
    state.reserve(len(tokens))
    cache = state.view().keys_values[LAYER]
    start = int(cache.length)
    rows = rows_of(state, tokens)
    cache.keys[start : start + len(tokens)] = rows
    cache.values[start : start + len(tokens)] = -rows


def commit(state: SequenceState, *tokens: int) -> None:
    """What a model's commit does, with states that count tokens."""
    write(state, tokens)
    now = state.committed
    state.advance(
        tokens,
        recurrent=[x + len(tokens) for x in now.recurrent],
        conv=[x - len(tokens) for x in now.conv],
    )


def assert_holds(state: SequenceState, *tokens: int) -> None:
    assert state.committed.tokens == tokens
    assert state.length == len(tokens)
    keys, values = state.keys_values(LAYER)
    assert torch.equal(keys, rows_of(state, tokens))
    assert torch.equal(values, -rows_of(state, tokens))
    assert all((x == len(tokens)).all() for x in state.committed.recurrent)
    assert all((x == -len(tokens)).all() for x in state.committed.conv)


def test_new_state_holds_nothing_but_zeros(state: SequenceState) -> None:
    assert_holds(state)
    assert [x.shape for x in state.committed.recurrent] == [(4, 32, 32)] * 3
    assert [x.shape for x in state.committed.conv] == [(3, 256)] * 3
    assert state.room == 600


@pytest.mark.parametrize("context", [0, -1, 131_073])
def test_context_beyond_the_model_is_refused(context: int, golden_config: ModelConfig) -> None:
    with pytest.raises(ValueError, match=f"context {context}.*131072"):
        SequenceState(golden_config, context=context, device="cpu", dtype=torch.float32)


def test_commits_follow_each_other(state: SequenceState) -> None:
    commit(state, 5, 6)
    commit(state, 7)
    assert_holds(state, 5, 6, 7)
    assert state.room == 597


def test_buffers_grow_up_to_the_context(state: SequenceState) -> None:
    tokens = [t % 97 for t in range(600)]
    for start in range(0, 600, 100):
        commit(state, *tokens[start : start + 100])
    assert_holds(state, *tokens)
    row_bytes = state.keys_values(LAYER)[0][0].nbytes
    assert state.nbytes.keys_values == 2 * 600 * row_bytes


def test_more_rows_than_room_are_refused_with_both_numbers(state: SequenceState) -> None:
    commit(state, *range(590))
    with pytest.raises(ValueError, match="11 rows, room for 10"):
        commit(state, *range(11))
    assert_holds(state, *range(590))


def test_written_rows_count_only_after_advance(state: SequenceState) -> None:
    commit(state, 1, 2)
    write(state, [8, 9])
    assert_holds(state, 1, 2)
    assert int(state.view().length) == 2
    commit(state, 3)
    assert_holds(state, 1, 2, 3)


def test_rewind_goes_back_and_forward_again(state: SequenceState) -> None:
    commit(state, 1, 2)
    early = state.checkpoint()
    commit(state, 3)
    late = state.checkpoint()
    state.rewind(early)
    assert_holds(state, 1, 2)
    state.rewind(late)
    assert_holds(state, 1, 2, 3)


def test_overwritten_point_cannot_be_restored(state: SequenceState) -> None:
    commit(state, 1, 2)
    early = state.checkpoint()
    commit(state, 3, 4)
    late = state.checkpoint()
    state.rewind(early)
    commit(state, 5)
    with pytest.raises(ValueError, match="after 4 tokens"):
        state.rewind(late)
    assert_holds(state, 1, 2, 5)
    state.rewind(early)
    assert_holds(state, 1, 2)


def test_rows_of_a_commit_that_failed_overwrite_too(state: SequenceState) -> None:
    commit(state, 1, 2)
    early = state.checkpoint()
    commit(state, 3, 4)
    late = state.checkpoint()
    state.rewind(early)
    write(state, [9])
    with pytest.raises(ValueError, match="after 4 tokens"):
        state.rewind(late)


@pytest.mark.parametrize(
    ("prompt", "length"),
    [
        ([1, 2, 3, 4, 5], 4),  # continues the present
        ([1, 2, 3, 4], 2),  # the present would leave nothing to commit
        ([1, 2, 9, 4, 5], 2),  # differs behind the checkpoint
        ([1, 2], 0),  # the checkpoint would leave nothing to commit
        ([2, 1, 3], 0),
        ([], 0),
    ],
)
def test_reuse_goes_to_the_longest_point_before_the_prompts_end(
    state: SequenceState, prompt: list[int], length: int
) -> None:
    commit(state, 1, 2)
    state.checkpoint()
    commit(state, 3, 4)
    assert state.reuse(prompt) == length
    assert_holds(state, *prompt[:length])


def test_reuse_may_go_forward_to_a_longer_checkpoint(state: SequenceState) -> None:
    commit(state, 1)
    early = state.checkpoint()
    commit(state, 2, 3)
    state.checkpoint()
    state.rewind(early)
    assert state.reuse([1, 2, 3, 4]) == 3
    assert_holds(state, 1, 2, 3)


def test_only_the_last_checkpoints_are_kept(state: SequenceState) -> None:
    for token in range(CHECKPOINTS + 1):
        commit(state, token)
        state.checkpoint()
    commit(state, 99)
    assert state.reuse([0, 1, 98]) == 2
    assert state.reuse([0, 98]) == 0


def test_a_point_is_kept_once(state: SequenceState) -> None:
    commit(state, 1)
    early = state.checkpoint()
    commit(state, 2)
    for _ in range(2 * CHECKPOINTS):
        state.checkpoint()
    assert state.reuse([1, 3]) == 1
    state.rewind(early)


def test_of_too_many_checkpoints_the_one_goes_that_is_nearest_to_another(
    state: SequenceState,
) -> None:
    token = 0
    for _ in range(CHECKPOINTS - 1):
        for _ in range(3):
            token += 1
            commit(state, token)
        state.checkpoint()  # 3, 7, 11, ... tokens, and 4, 8, 12, ...
        token += 1
        commit(state, token)
        state.checkpoint()
    tokens = list(range(1, token + 1))
    assert state.reuse([*tokens[:3], 0]) == 3


def test_reset_forgets_checkpoints_too(state: SequenceState) -> None:
    commit(state, 1, 2)
    point = state.checkpoint()
    state.reset()
    assert_holds(state)
    with pytest.raises(ValueError, match="after 2 tokens"):
        state.rewind(point)
    assert state.reuse([1, 2, 3]) == 0


def test_checkpoint_is_not_touched_by_later_commits(state: SequenceState) -> None:
    commit(state, 1, 2)
    point = state.checkpoint()
    commit(state, 3)
    assert isinstance(point, Committed)
    assert all((x == 2).all() for x in point.recurrent)


def test_bytes_count_buffers_states_and_each_checkpoint(state: SequenceState) -> None:
    commit(state, 1)
    before = state.nbytes
    assert before.recurrent == 3 * 4 * 32 * 32 * 4
    assert before.conv == 3 * 3 * 256 * 4
    assert before.keys_values == 2 * FIRST_ROWS * 2 * 32 * 4
    assert before.checkpoints == 0
    early = state.checkpoint()
    assert state.nbytes.checkpoints == before.recurrent + before.conv
    commit(state, 2)
    state.checkpoint()
    assert state.nbytes.checkpoints == 2 * (before.recurrent + before.conv)
    state.rewind(early)  # shares the tensors of a checkpoint
    assert state.nbytes.checkpoints == before.recurrent + before.conv


def test_a_checkpoint_keeps_its_numbers_whatever_becomes_of_the_tensors(
    state: SequenceState,
) -> None:
    commit(state, 1)
    kept = state.checkpoint()
    for x in (*state.committed.recurrent, *state.committed.conv):
        x.fill_(torch.nan)
    state.rewind(kept)
    assert_holds(state, 1)


def test_other_tensors_take_the_place_of_the_committed_ones_only_for_the_same_tokens(
    state: SequenceState,
) -> None:
    commit(state, 1)
    copy = state.committed.copy_to(state.device)
    state.place(copy)
    assert state.committed is copy
    assert_holds(state, 1)
    commit(state, 2)
    with pytest.raises(ValueError, match="1 tokens, 2 are committed"):
        state.place(copy)


def test_a_preview_may_use_no_rows_that_may_count_again(state: SequenceState) -> None:
    def is_spare() -> bool:
        return state.view(scratch=True).keys_values[LAYER].spare

    commit(state, 1, 2)
    early = state.checkpoint()
    commit(state, 3, 4)
    assert is_spare() and not state.view().keys_values[LAYER].spare
    state.rewind(early)
    assert not is_spare()  # a later rewind may go forward to them
    commit(state, 5)
    assert is_spare()
    write(state, [6])
    assert not is_spare()  # as a verify does, whose rows may be accepted
    commit(state, 6)
    assert is_spare()
