"""The NF4 baseline through bitsandbytes, and the sentence where that is absent."""

import importlib
import importlib.util

import pytest
import torch

from clover_local.errors import CloverError
from clover_local.quant.nf4 import nf4_round

needs_bitsandbytes = pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed"
)


@needs_bitsandbytes
def test_each_block_of_a_row_has_at_most_16_values() -> None:
    torch.manual_seed(1)
    weight = torch.randn(2, 3, 128).bfloat16()
    rounded = nf4_round(weight)
    assert rounded.shape == weight.shape
    assert rounded.dtype == torch.float32
    for block in rounded.reshape(-1, 64):
        assert len(block.unique()) <= 16
    largest = weight.float().reshape(2, 3, 2, 64).abs().amax(-1)
    torch.testing.assert_close(rounded.reshape(2, 3, 2, 64).abs().amax(-1), largest)
    assert float((rounded - weight.float()).square().mean()) < 0.02


def test_absent_bitsandbytes_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(importlib, "import_module", absent)
    with pytest.raises(CloverError, match=r"clover-local\[bitsandbytes\]"):
        nf4_round(torch.ones(2, 64))


def test_blocks_must_fill_the_rows() -> None:
    with pytest.raises(ValueError, match="64 does not divide the 65"):
        nf4_round(torch.ones(2, 65))
