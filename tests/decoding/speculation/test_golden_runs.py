"""The golden draft runs, token for token and round for round."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

from clover_local.cache import SequenceState
from clover_local.config import ModelConfig, parse_generation_config
from clover_local.decoding.settings import resolve
from clover_local.generate import generate
from clover_local.model.clover import Clover

EmptyState = Callable[[ModelConfig], SequenceState]
CASES = [
    "draft_exact",
    "draft_typical",
    "draft_open",
    "draft_small_delta",
    "draft_penalties_exact",
    "draft_penalties",
    "draft_stop_in_round",
]


@pytest.mark.parametrize("name", CASES)
def test_golden_draft_run(
    name: str, golden_model: Clover, golden_cases: Mapping[str, Any], empty_state: EmptyState
) -> None:
    """The state holds all of it but the pending token, as if committed at once."""
    (case,) = (run for run in golden_cases["runs"] if run["name"] == name)
    config, accept = golden_model.config, case["accept"]
    generation = parse_generation_config(case["generation_config"], config, "the file")
    flags = {
        "mode": "draft",
        "max_new_tokens": case["max_new_tokens"],
        "draft_width": case["width"],
        "accept": "exact" if accept["exact"] else "typical",
        "accept_ratio": accept.get("ratio"),
        "accept_delta": accept.get("delta"),
    }
    settings = resolve(config, generation, flags).settings
    state, once = empty_state(config), empty_state(config)
    result = generate(golden_model, state, settings, golden_cases["prompt"])
    assert list(result.token_ids) == case["tokens"]
    assert [each.to_json() for each in result.rounds] == case["rounds"]
    assert list(state.committed.tokens) == golden_cases["prompt"] + case["tokens"][:-1]
    golden_model.commit(state.committed.tokens, once)
    for a, b in zip(
        (*state.committed.recurrent, *state.committed.conv),
        (*once.committed.recurrent, *once.committed.conv),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=0, atol=2e-5)
