"""What forwards need besides weights and state."""

import torch

from clover_local.config import ModelConfig
from clover_local.decoding.settings import Settings
from clover_local.kernels.gated_delta_commit import LayeredRecord
from clover_local.kernels.gpu.delta import gated_delta_chunked
from clover_local.memory.sizes import MIB
from clover_local.memory.workspace import (
    CHUNK_ROWS,
    DRAFT_ROWS,
    GRAPH_BYTES,
    SPAN_ROWS,
    chunk_bytes,
    graph_pool,
    logits_bytes,
    pick_workspace,
    prompt_workspace,
    record_bytes,
)
from clover_local.model.gated_delta_net import heads_of


def test_the_real_model_needs_most_for_its_delta_rule(real_config: ModelConfig) -> None:
    stream = 3 * 2048 * 2
    gdn = (8192 + 4096 + 64) * 2 + (8192 + 64) * 4 + 4096 * (4 + 2)
    span = 512 * (4096 + 4096 + 64) * 4 + 16 * 32 * 128 * 128 * 4
    moe = 8 * 256 + 8 * (512 * 2 + 4 * 2048) + 4 * 2048 + 3 * 512 * 2
    assert 2048 * gdn + span > 2048 * moe
    needed = chunk_bytes(real_config, rows=2048, number_bytes=2)
    assert needed == 2048 * (stream + gdn) + span
    assert 200 * MIB < needed < 250 * MIB


def test_an_odd_model_of_few_rows_needs_most_for_what_a_chunk_keeps(
    odd_config: ModelConfig,
) -> None:
    qkv = 2 * 2 * 12 + 6 * 20
    gdn = (qkv + 6 * 20 + 2 * 6) * 4 + (qkv + 2 * 6) * 4 + 6 * 20 * (4 + 4)
    span = 7 * (6 * 20 + 6 * 12 + 2 * 6) * 4 + 6 * 12 * 20 * 4
    attention = 7 * (5 * 6 + 3 * 3) * 24 * 4
    assert 7 * gdn + span > attention
    assert chunk_bytes(odd_config, rows=7, number_bytes=4) == 7 * (3 * 40 * 4 + gdn) + span


def test_spans_and_chunks_are_those_of_the_kernel() -> None:
    assert gated_delta_chunked.SPAN == SPAN_ROWS
    assert gated_delta_chunked.CHUNKED.chunk == CHUNK_ROWS


def test_a_prompt_makes_one_row_of_logits_and_a_graph_a_block_of_them(
    real_config: ModelConfig,
) -> None:
    row = 248_320 * 6
    assert logits_bytes(real_config, rows=32, number_bytes=2) == 32 * row
    chunk = chunk_bytes(real_config, rows=32, number_bytes=2)
    assert prompt_workspace(real_config, rows=32, number_bytes=2) == chunk + row
    logits, record = 2 * 32 * 248_320 * 2, 16 * 30 * (8192 * 6 + 64 * 4)
    assert record_bytes(real_config, rows=16, number_bytes=2) == record
    assert graph_pool(real_config, number_bytes=2) == chunk + logits + record + GRAPH_BYTES
    assert pick_workspace(real_config, rows=32) == 9 * 32 * 248_320 * 4
    assert pick_workspace(real_config, rows=0) == 0


def test_the_record_is_what_a_verify_of_the_usual_width_writes(odd_config: ModelConfig) -> None:
    settings = Settings(odd_config.mask_token_id, odd_config.vocab_size)
    assert settings.draft_width == DRAFT_ROWS
    record = LayeredRecord.empty(
        3, 16, heads=heads_of(odd_config), dtype=torch.bfloat16, device=torch.device("meta")
    )
    tensors = (record.inputs, record.mixed, record.g, record.beta)
    assert record_bytes(odd_config, rows=16, number_bytes=2) == sum(x.nbytes for x in tensors)
