"""Attention over committed rows in a buffer and a pass's own, against the plain operator."""

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from clover_local.kernels import block_attention as plain
from clover_local.kernels.gpu.attention.block_attention import (
    CONFIGS,
    FLOAT32,
    NARROW,
    WIDE,
    AttentionConfig,
    Tile,
    block_attention,
    causal_attention,
)

H, H_KV, DH = 6, 2, 24
SMALL = AttentionConfig(1 << 62, WIDE, ranges=3)
TOLERANCES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


@dataclass(frozen=True, eq=False)
class Pass:
    """A pass's rows and what is committed before them, with NaN behind it in the buffer."""

    q: Tensor
    keys: Tensor
    values: Tensor
    cached_keys: Tensor
    cached_values: Tensor
    length: Tensor
    gate: Tensor

    @classmethod
    def of(cls, rows: int, committed: int, *, dtype: torch.dtype, device: str) -> "Pass":
        generator = torch.Generator().manual_seed(rows * 100 + committed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator).to(device, dtype)

        q, gate = normal(rows, H, 2 * DH).chunk(2, dim=-1)  # heads are apart, as in the model
        keys, values = (x.view(rows, H_KV, DH) for x in normal(rows, 2 * H_KV * DH).chunk(2, 1))
        cached = torch.full((2, committed + 5, H_KV, DH), torch.nan, dtype=dtype, device=device)
        cached[:, :committed] = normal(2, committed, H_KV, DH)
        length = torch.tensor([committed], dtype=torch.int32, device=device)
        return cls(q, keys, values, cached[0], cached[1], length, gate)

    def kernel(self, *, is_causal: bool, config: AttentionConfig | None = SMALL) -> Tensor:
        attend = causal_attention if is_causal else block_attention
        return attend(
            self.q,
            self.keys,
            values=self.values,
            cached_keys=self.cached_keys,
            cached_values=self.cached_values,
            length=self.length,
            gate=self.gate,
            config=config,
        )

    def plain(self, *, is_causal: bool) -> Tensor:
        committed = int(self.length)
        keys = torch.cat([self.cached_keys[:committed], self.keys]).float()
        values = torch.cat([self.cached_values[:committed], self.values]).float()
        attend = plain.causal_attention if is_causal else plain.block_attention
        out = attend(self.q.float(), keys, values=values)
        return (out * self.gate.float().sigmoid()).to(self.q.dtype)


@pytest.mark.parametrize("is_causal", [False, True], ids=["all", "causal"])
@pytest.mark.parametrize(
    ("rows", "committed", "dtype"),
    [
        (1, 0, torch.float32),
        (1, 45, torch.float32),
        (7, 3, torch.float32),
        (17, 32, torch.float32),
        (32, 133, torch.float32),
        (33, 0, torch.float32),
        (16, 37, torch.float16),
        (16, 37, torch.bfloat16),
    ],
    ids=str,
)
def test_kernel_is_the_plain_operator(
    rows: int, committed: int, dtype: torch.dtype, is_causal: bool, device: str
) -> None:
    x = Pass.of(rows, committed, dtype=dtype, device=device)
    before = x.cached_keys.clone(), x.cached_values.clone()
    out, expected = x.kernel(is_causal=is_causal), x.plain(is_causal=is_causal)
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(out, expected, rtol=tolerance, atol=tolerance)
    for cached, kept in zip((x.cached_keys, x.cached_values), before, strict=True):
        assert torch.equal(cached.nan_to_num(9.0), kept.nan_to_num(9.0))


@pytest.mark.parametrize("ranges", sorted({config.ranges for config in CONFIGS}))
def test_any_number_of_ranges_computes_the_same(ranges: int, device: str) -> None:
    x = Pass.of(2, 70, dtype=torch.float16, device=device)
    config = AttentionConfig(1 << 62, WIDE, ranges)
    out = x.kernel(is_causal=True, config=config)
    torch.testing.assert_close(out, x.plain(is_causal=True), rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("is_causal", [False, True], ids=["all", "causal"])
@pytest.mark.parametrize("tile", [NARROW, FLOAT32], ids=["narrow", "float32"])
def test_every_tile_computes_the_same(tile: Tile, is_causal: bool, device: str) -> None:
    x = Pass.of(9, 40, dtype=torch.float32, device=device)
    out = x.kernel(is_causal=is_causal, config=AttentionConfig(1 << 62, tile, ranges=1))
    torch.testing.assert_close(out, x.plain(is_causal=is_causal), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_table_has_a_configuration_for_every_dtype(dtype: torch.dtype, device: str) -> None:
    x = Pass.of(2, 9, dtype=dtype, device=device)
    out = x.kernel(is_causal=True, config=None)
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(out, x.plain(is_causal=True), rtol=tolerance, atol=tolerance)


def test_large_scores_stay_finite(device: str) -> None:
    x = Pass.of(5, 40, dtype=torch.float32, device=device)
    x = replace(x, q=x.q * 300)
    torch.testing.assert_close(
        x.kernel(is_causal=True), x.plain(is_causal=True), rtol=1e-4, atol=1e-4
    )


def test_tensors_that_do_not_fit_are_refused_with_both_values(device: str) -> None:
    x = Pass.of(3, 8, dtype=torch.float16, device=device)
    with pytest.raises(ValueError, match=r"values is \[2, 2, 24\], not \[3, 2, 24\]"):
        replace(x, values=x.values[:2]).kernel(is_causal=False)
    with pytest.raises(ValueError, match=r"cached keys is torch.float32, not torch.float16"):
        replace(x, cached_keys=x.cached_keys.float()).kernel(is_causal=False)
    with pytest.raises(ValueError, match=r"length is torch.int64, not torch.int32"):
        replace(x, length=x.length.long()).kernel(is_causal=False)
    shifted = torch.zeros(13 * H_KV * DH + 1, dtype=torch.float16, device=device)[1:]
    with pytest.raises(ValueError, match="cached keys starts 2 bytes behind a multiple of 16"):
        replace(x, cached_keys=shifted.view(13, H_KV, DH)).kernel(is_causal=False)
