"""Attention against the formula, head by head and row by row in float64."""

import pytest
import torch
from torch import Tensor

from clover_local.kernels.block_attention import (
    AttentionRows,
    KeysValues,
    attend_preview,
    block_attention,
    causal_attention,
)

H, H_KV, DH = 6, 3, 24


def attended(q: Tensor, keys: Tensor, *, values: Tensor, seen: list[int]) -> Tensor:
    """Row t of `q` over the first `seen[t]` keys."""
    out = torch.zeros(q.shape, dtype=torch.float64)
    for t, count in enumerate(seen):
        for h in range(H):
            head = h // (H // H_KV)
            scores = keys[:count, head].double() @ q[t, h].double() / DH**0.5
            out[t, h] = scores.softmax(0) @ values[:count, head].double()
    return out.float()


def tensors(rows: int, length: int) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(rows * 100 + length)
    return torch.randn(rows, H, DH), torch.randn(length, H_KV, DH), torch.randn(length, H_KV, DH)


@pytest.mark.parametrize(
    ("rows", "length"), [(1, 1), (1, 45), (13, 13), (13, 14), (31, 76), (33, 300)]
)
def test_causal_row_sees_what_is_committed_and_the_new_rows_up_to_itself(
    rows: int, length: int
) -> None:
    q, keys, values = tensors(rows, length)
    seen = [length - rows + t + 1 for t in range(rows)]
    expected = attended(q, keys, values=values, seen=seen)
    torch.testing.assert_close(causal_attention(q, keys, values=values), expected)


@pytest.mark.parametrize(("rows", "length"), [(1, 1), (7, 7), (32, 77)])
def test_block_row_sees_every_key(rows: int, length: int) -> None:
    q, keys, values = tensors(rows, length)
    expected = attended(q, keys, values=values, seen=[length] * rows)
    torch.testing.assert_close(block_attention(q, keys, values=values), expected)


@pytest.mark.parametrize("room", [0, 31, 32, 50])
def test_a_preview_in_spare_rows_gives_the_same_bits_and_leaves_the_committed_ones(
    room: int,
) -> None:
    q, keys, values = tensors(32, 77 + room)
    rows = AttentionRows(
        q, torch.randn(32, H_KV, DH), torch.randn(32, H_KV, DH), torch.randn_like(q)
    )
    length, kept = torch.tensor([77], dtype=torch.int32), (keys.clone(), values.clone())
    without = attend_preview(rows, KeysValues(keys, values, length))
    assert torch.equal(keys, kept[0]) and torch.equal(values, kept[1])
    assert torch.equal(attend_preview(rows, KeysValues(keys, values, length, spare=True)), without)
    assert torch.equal(keys[:77], kept[0][:77]) and torch.equal(values[:77], kept[1][:77])
