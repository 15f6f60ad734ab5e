"""Keys and values go behind the committed rows, whose number is on the device."""

import pytest
import torch

from clover_local.kernels.gpu.attention.append_rows import append_rows


@pytest.mark.parametrize(("rows", "committed"), [(1, 0), (7, 4), (3, 17)])
def test_rows_are_written_behind_the_committed_ones_and_nowhere_else(
    rows: int, committed: int, device: str
) -> None:
    torch.manual_seed(0)
    new = torch.randn(rows, 2, 3 * 200, dtype=torch.float16, device=device)
    keys, values = new[..., 200:400], new[..., 400:]
    cached = torch.randn(2, 19, 2, 200, dtype=torch.float16, device=device)
    expected = cached.clone()
    room = min(rows, 19 - committed)
    expected[0, committed : committed + room] = keys[:room]
    expected[1, committed : committed + room] = values[:room]
    length = torch.tensor([committed], dtype=torch.int32, device=device)
    append_rows(keys, values, cached_keys=cached[0], cached_values=cached[1], length=length)
    assert torch.equal(cached, expected)


def test_tensors_that_do_not_fit_are_refused_with_both_values(device: str) -> None:
    rows = torch.zeros(3, 2, 8, device=device)
    cached = torch.zeros(9, 2, 8, device=device)
    length = torch.zeros(1, dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match=r"values is \[2, 2, 8\], not \[3, 2, 8\]"):
        append_rows(rows, rows[:2], cached_keys=cached, cached_values=cached, length=length)
    with pytest.raises(ValueError, match=r"cached values is \[9, 2, 7\], not \[9, 2, 8\]"):
        append_rows(rows, rows, cached_keys=cached, cached_values=cached[..., 1:], length=length)
