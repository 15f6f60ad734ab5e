"""Batches: every block starts at a multiple of the block size, and only answers count fully."""

from pathlib import Path
from types import ModuleType

import torch

import clover_local.demo
from clover_local.config import read_model_config

FOLDER = Path(clover_local.demo.__file__).parent


def test_blocks_start_where_answers_start_and_masks_count(demo_batches: ModuleType) -> None:
    config = read_model_config(FOLDER)
    source = demo_batches.ExampleSource(FOLDER, seed=3)
    seen = 0
    for batch, targets in source.batches({"sums": 1.0, "tools": 1.0}, config, rows=900):
        seen += len(batch.tokens)
        assert batch.tokens.shape[1] % config.block_size == 0
        masked = batch.noisy == config.mask_token_id
        assert torch.equal(batch.noisy[~masked], targets.masked_token[~masked])
        assert not targets.masked_weight[~masked].any()
        weights = torch.tensor([0.0, demo_batches.TAIL_WEIGHT, 1.0])
        assert torch.isin(targets.masked_weight, weights).all()
        blocks = batch.tokens.view(len(batch.tokens), -1, config.block_size)
        assert torch.equal(blocks[batch.example, batch.block], targets.masked_token)
        for row, start in enumerate(batch.start.tolist()):
            assert not targets.next_weight[row, :start].any()  # padding
            text = source.tokenizer.decode(
                targets.next_token[row][targets.next_weight[row] == 1].tolist(),
                skip_special_tokens=False,
            )
            assert text.endswith("<|im_end|>")
    assert seen == demo_batches.POOL


def test_an_answer_that_fills_its_block_gets_no_tail(demo_batches: ModuleType) -> None:
    config = read_model_config(FOLDER)
    source = demo_batches.ExampleSource(FOLDER, seed=3)
    size = config.block_size
    full = demo_batches.Sequence("sums", [5] * (7 + size), prompt=7, start=7)
    _, targets = source.collate([full], config)
    assert set(targets.masked_weight.unique().tolist()) <= {0.0, 1.0}
