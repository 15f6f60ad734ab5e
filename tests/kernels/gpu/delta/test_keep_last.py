"""Conv states behind accepted rows, of several layers, against their definition."""

import pytest
import torch

from clover_local.kernels.gated_delta_commit import conv_after
from clover_local.kernels.gpu.delta.keep_last import keep_last

LAYERS, CHANNELS = 2, 700


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", [1, 2, 3, 5])
@pytest.mark.parametrize("kept", [1, 3])
def test_kernel_is_the_definition(rows: int, kept: int, dtype: torch.dtype, device: str) -> None:
    """Of rows that others follow, into another place and into the same."""
    generator = torch.Generator().manual_seed(rows)
    room = torch.randn(LAYERS, 7, CHANNELS, generator=generator).to(device, dtype)
    conv = torch.randn(LAYERS, kept, CHANNELS, generator=generator).to(device)
    before, place = conv.clone(), torch.empty_like(conv)
    keep_last(room[:, :rows], conv, new_conv=place)
    expected = torch.stack([conv_after(room[i, :rows], conv[i]) for i in range(LAYERS)])
    assert torch.equal(place, expected)
    assert torch.equal(conv, before)
    keep_last(room[:, :rows], conv, new_conv=conv)
    assert torch.equal(conv, expected)


def test_no_layers_are_no_work(device: str) -> None:
    none = torch.empty(0, 3, CHANNELS, device=device)
    keep_last(none, none, new_conv=none)


def test_tensors_that_do_not_fit_are_refused_with_both_values(device: str) -> None:
    inputs = torch.zeros(LAYERS, 4, CHANNELS, device=device)
    conv = torch.zeros(LAYERS, 3, CHANNELS, device=device)
    with pytest.raises(ValueError, match=r"0 rows \(1 at least\)"):
        keep_last(inputs[:, :0], conv, new_conv=conv)
    with pytest.raises(ValueError, match=r"conv is \[1, 3, 700\], not \[2, 3, 700\]"):
        keep_last(inputs, conv[:1], new_conv=conv)
    with pytest.raises(ValueError, match=r"new conv is torch.float16, not torch.float32"):
        keep_last(inputs, conv, new_conv=conv.half())
