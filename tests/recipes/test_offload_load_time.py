"""The load time recipe writes a checkpoint that it can read, keep and load."""

from dataclasses import replace
from pathlib import Path

import pytest

from clover_local.checkpoint.placements import open_checkpoint
from clover_local.counted import counted_bytes, gap
from clover_local.decoding.settings import resolve
from clover_local.placement import MemoryOptions
from clover_local.session import load, open_model
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


@pytest.mark.parametrize("megabytes", [72, 78, 1000])
def test_experts_of_the_real_shape_take_what_was_planned(tmp_path: Path, megabytes: int) -> None:
    recipe = load_recipe("offload_load_time")
    config = replace(recipe.shape(2), num_experts=16, vocab_size=512, mask_token_id=511)
    recipe.write(tmp_path, config)
    checkpoint = open_checkpoint(tmp_path, config)
    opened = replace(open_model("demo"), folder=tmp_path, config=config, checkpoint=checkpoint)
    settings = resolve(config, opened.generation, {}).settings
    memory = MemoryOptions(device_bytes=megabytes * 1_000_000)
    session = load(opened, settings, device="cpu", dtype="bfloat16", context=300, memory=memory)
    plan = session.placement.plan
    assert plan is not None
    assert session.placement.offloads == (megabytes < 1000)
    counted = counted_bytes(session.model, session.generator.state)
    assert abs(gap(plan, counted)) < 0.01, (plan.device_parts, counted)
