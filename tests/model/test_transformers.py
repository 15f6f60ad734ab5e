"""The causal pass against transformers' own Qwen3.5-MoE, where that is installed."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from clover_local.cache import SequenceState
from clover_local.config import ModelConfig
from clover_local.model.clover import Clover

transformers = pytest.importorskip("transformers")

DIFFUSION = ("conv_right_weight", "bd_softmax_")
OURS = ("model_type", "architectures", "block_size", "mask_token_id", "denoising_config")


@pytest.mark.skipif(
    not hasattr(transformers, "Qwen3_5MoeForCausalLM"),
    reason="this transformers has no Qwen3_5MoeForCausalLM",
)
def test_causal_logits_are_those_of_transformers(
    golden_folder: Path,
    golden_model: Clover,
    golden_cases: Mapping[str, Any],
    empty_state: Callable[[ModelConfig], SequenceState],
) -> None:
    values = json.loads((golden_folder / "config.json").read_text(encoding="utf-8"))
    known = {key: value for key, value in values.items() if key not in OURS}
    theirs = transformers.Qwen3_5MoeForCausalLM(transformers.Qwen3_5MoeTextConfig(**known)).float()
    weights = load_file(golden_folder / "model.safetensors")
    causal = {
        name: value.float()
        for name, value in weights.items()
        if not any(family in name for family in DIFFUSION)
    }
    theirs.load_state_dict(causal)
    tokens = [*golden_cases["prompt"], *golden_cases["commit_block"]]
    with torch.no_grad():
        expected = theirs.eval()(torch.tensor([tokens])).logits[0]
    got = golden_model.commit(tokens, empty_state(golden_model.config), logits="all").logits
    torch.testing.assert_close(got, expected, rtol=0, atol=2e-5)
