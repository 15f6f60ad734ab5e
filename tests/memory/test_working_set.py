"""Distinct experts of a forward."""

from dataclasses import replace

import pytest

from clover_local.config import ModelConfig
from clover_local.memory.working_set import (
    ar_experts,
    commit_experts,
    draft_experts,
    preview_experts,
)

USES = (ar_experts, draft_experts, preview_experts, commit_experts)


def test_the_real_model_uses_what_was_measured(real_config: ModelConfig) -> None:
    assert [uses(real_config) for uses in USES] == [8, 49, 70, 100]


def test_no_forward_uses_more_experts_than_there_are(golden_config: ModelConfig) -> None:
    assert [uses(golden_config) for uses in USES] == [2, 8, 8, 8]


def test_shorter_blocks_use_fewer_experts_and_one_row_those_of_a_token(
    real_config: ModelConfig,
) -> None:
    used = [preview_experts(replace(real_config, block_size=rows)) for rows in (1, 4, 16, 32, 64)]
    assert used[0] == 8
    assert used == sorted(set(used))
    assert used[2] == pytest.approx(45.4, abs=0.1)
