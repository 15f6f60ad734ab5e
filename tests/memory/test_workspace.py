"""What forwards need besides weights and state."""

from clover_local.config import ModelConfig
from clover_local.memory.sizes import MIB
from clover_local.memory.workspace import (
    GRAPH_BYTES,
    chunk_bytes,
    graph_pool,
    logits_bytes,
    prompt_workspace,
)


def test_the_real_model_needs_most_for_its_experts_results(real_config: ModelConfig) -> None:
    row = 3 * 2048 * 2  # stream
    row += 8 * 256 + 8 * (512 * 2 + 4 * 2048) + 4 * 2048 + 3 * 512 * 2  # MoE
    assert chunk_bytes(real_config, rows=2048, number_bytes=2) == 2048 * row
    assert 150 * MIB < 2048 * row < 250 * MIB


def test_an_odd_model_needs_most_for_its_mixers(odd_config: ModelConfig) -> None:
    qkv = 2 * 2 * 12 + 6 * 20
    gdn = (2 * qkv + 6 * 20 + 2 * 6 + 2 * 2 * 12) * 4 + 6 * 20 * (4 + 2 * 4)
    attention = (5 * 6 + 3 * 3) * 24 * 4
    assert gdn < attention
    assert chunk_bytes(odd_config, rows=7, number_bytes=4) == 7 * (3 * 40 * 4 + attention)


def test_a_prompt_makes_one_row_of_logits_and_a_graph_a_block_of_them(
    real_config: ModelConfig,
) -> None:
    row = 248_320 * 6
    assert logits_bytes(real_config, rows=32, number_bytes=2) == 32 * row
    chunk = chunk_bytes(real_config, rows=32, number_bytes=2)
    assert prompt_workspace(real_config, rows=32, number_bytes=2) == chunk + row
    assert graph_pool(real_config, number_bytes=2) == chunk + 32 * row + GRAPH_BYTES
