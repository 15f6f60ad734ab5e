"""The load time recipe writes a checkpoint that it can read, keep and load."""

from dataclasses import replace
from pathlib import Path

from clover_local.checkpoint.placements import open_checkpoint
from tests.recipes.conftest import load_recipe


def test_a_small_checkpoint_is_written_once_and_loaded(tmp_path: Path) -> None:
    recipe = load_recipe("offload_load_time")
    config = replace(
        recipe.shape(2), hidden_size=256, moe_intermediate_size=128, num_experts=3, vocab_size=40
    )
    recipe.write(tmp_path, config)
    checkpoint = open_checkpoint(tmp_path, config)
    checkpoint.require_fit()
    recipe.forget(checkpoint)
    assert recipe.read_files(checkpoint) > 0 < recipe.keep_files(checkpoint)
    seconds, nbytes = recipe.load(checkpoint, config, share=1.0)
    assert seconds > 0 and nbytes == 6 * (3 * 128 * 256 // 2 + 3 * 512)
